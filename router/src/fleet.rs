//! The fleet view: which workers there are, what they say of themselves, and which may be used.

mod agreement;
mod discovery;
mod member;
mod watch;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use baton_dispatch::{Role, WorkerState, WorkerView};
use baton_handoff::InstanceId;
use baton_telemetry::metrics::WorkerCount;

pub(crate) use discovery::Discovery;
pub(crate) use member::{InFlight, Member};

use crate::RouterError;

/// Every worker this router knows of.
pub(crate) struct Fleet {
    members: Vec<Arc<Member>>,
    patience: Patience,
    since: Instant,
    /// Digest of the model whose tokenizer is used, once it is known.
    digest: OnceLock<[u8; 32]>,
}

/// How long a worker may be silent or stand still.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) heartbeat_timeout: Duration,
    pub(crate) stall_timeout: Duration,
}

/// A prefill worker that was never heard of counts as starting for this long, so that a cluster that comes up does
/// not begin by serving without it.
const STARTING: Duration = Duration::from_secs(10);

/// One worker, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) address: String,
    pub(crate) role: &'static str,
    pub(crate) state: &'static str,
    /// Why it is not ready.
    pub(crate) reason: Option<String>,
}

impl Fleet {
    /// Nobody is heard of until [`Fleet::watch`] runs.
    pub(crate) fn new(discovery: &Discovery, patience: Patience) -> Result<Arc<Self>, RouterError> {
        let members = discovery
            .workers()
            .into_iter()
            .map(|(role, address)| Member::new(role, address).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Arc::new(Self { members, patience, since: Instant::now(), digest: OnceLock::new() }))
    }

    /// Keeps the view current until the future is dropped.
    pub(crate) async fn watch(self: Arc<Self>) {
        let readers = self.members.iter().map(|member| watch::keep(&self, member));
        tokio::join!(futures::future::join_all(readers), watch::patrol(&self));
    }

    /// Workers of another model than this one are refused from now on.
    pub(crate) fn set_digest(&self, digest: [u8; 32]) {
        let _ = self.digest.set(digest);
        self.judge();
    }

    /// The worker behind an index of [`Fleet::views`].
    pub(crate) fn member(&self, index: usize) -> Option<&Arc<Member>> {
        self.members.get(index)
    }

    /// What placement chooses from.
    pub(crate) fn views(&self) -> Vec<WorkerView> {
        self.members.iter().enumerate().map(|(index, member)| member.view(index)).collect()
    }

    /// Tokens of a block, as the workers agree; `None` before any was heard of.
    pub(crate) fn block_size(&self) -> Option<u32> {
        self.members.iter().find_map(|member| member.offer().map(|offer| offer.block_size))
    }

    /// Tokens of prompt and output that every usable worker can hold; `None` before any was heard of.
    pub(crate) fn context(&self) -> Option<u32> {
        self.members.iter().filter_map(|member| member.offer().map(|offer| offer.context)).min()
    }

    /// What keeps a chat from being served; empty when nothing does.
    pub(crate) fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if !self.any(Role::Decode, WorkerState::Ready) {
            missing.push("a ready decode worker".to_owned());
        }
        let no_prefill = !self.any(Role::Prefill, WorkerState::Ready);
        let comes = self.any(Role::Prefill, WorkerState::Loading)
            || (self.since.elapsed() < STARTING
                && self.members.iter().any(|member| member.is_awaited(Role::Prefill)));
        if no_prefill && comes {
            missing.push("a ready prefill worker (one is starting)".to_owned());
        }
        missing
    }

    fn any(&self, role: Role, state: WorkerState) -> bool {
        self.members.iter().any(|member| member.role == role && member.state() == state)
    }

    /// Every worker, for people.
    pub(crate) fn reports(&self) -> Vec<Report> {
        self.members.iter().map(|member| member.report()).collect()
    }

    /// Workers by role and state, for the scrape.
    pub(crate) fn counts(&self) -> Vec<WorkerCount> {
        let mut counts: Vec<WorkerCount> = Vec::new();
        for report in self.reports() {
            match counts.iter_mut().find(|count| count.role == report.role && count.state == report.state) {
                Some(count) => count.num += 1,
                None => counts.push(WorkerCount { role: report.role, state: report.state, num: 1 }),
            }
        }
        counts
    }

    /// Decides anew who agrees with whom; called whenever a description changes.
    fn judge(&self) {
        let descriptions: Vec<_> = self.members.iter().map(|member| member.description()).collect();
        let verdicts = agreement::judge(&descriptions, self.digest.get());
        for (member, verdict) in self.members.iter().zip(verdicts) {
            member.set_refusal(verdict);
        }
    }
}

/// The instance id of a message, if it is one.
fn instance(bytes: &[u8]) -> Option<InstanceId> {
    InstanceId::from_slice(bytes)
}

/// The name of a role for metrics, logs and people.
pub(crate) const fn role_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}
