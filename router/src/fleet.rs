//! The fleet view: which workers there are, what they say of themselves, and which may be used.

mod agreement;
mod cache;
mod capacity;
mod discovery;
mod member;
mod placing;
mod watch;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use baton_dispatch::{CacheIndex, Links, Placer, Policy, Role, WorkerState, WorkerView};
use baton_handoff::InstanceId;
use baton_kv::KvLayout;
use baton_telemetry::metrics::WorkerCount;

pub(crate) use capacity::Capacity;
pub(crate) use discovery::Discovery;
pub(crate) use member::{InFlight, Member};
use placing::Placing;
pub(crate) use placing::{Found, Wanted};

use crate::RouterError;

/// Every worker this router knows of.
pub(crate) struct Fleet {
    members: Vec<Arc<Member>>,
    placing: Mutex<Placing>,
    /// Whether placement looks at what workers have cached.
    reads_caches: bool,
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
    pub(crate) fn new(
        discovery: &Discovery,
        patience: Patience,
        placer: Placer,
    ) -> Result<Arc<Self>, RouterError> {
        let members = discovery
            .workers()
            .into_iter()
            .map(|(role, address)| Member::new(role, address).map(Arc::new))
            .collect::<Result<_, _>>()?;
        let reads_caches = placer.policy() == Policy::KvAware;
        let placing = Placing { placer, cache: CacheIndex::default(), links: Links::default() };
        Ok(Arc::new(Self {
            members,
            placing: Mutex::new(placing),
            reads_caches,
            patience,
            since: Instant::now(),
            digest: OnceLock::new(),
        }))
    }

    /// Keeps the view current until the future is dropped.
    pub(crate) async fn watch(self: Arc<Self>) {
        let readers =
            self.members.iter().enumerate().map(|(index, member)| watch::keep(&self, index, member));
        tokio::join!(futures::future::join_all(readers), watch::patrol(&self));
    }

    /// Workers of another model than this one are refused from now on.
    pub(crate) fn set_digest(&self, digest: [u8; 32]) {
        let _ = self.digest.set(digest);
        self.judge();
    }

    /// What placement chooses from. A decode worker that failed requests is better than none, so when no other is ready
    /// those count as ready; without prefill workers requests run locally.
    fn views(&self) -> Vec<WorkerView> {
        let mut views: Vec<WorkerView> =
            self.members.iter().enumerate().map(|(index, member)| member.view(index)).collect();
        let decodes = |view: &WorkerView| view.role == Role::Decode;
        if !views.iter().any(|view| decodes(view) && view.state == WorkerState::Ready) {
            for (view, member) in views.iter_mut().zip(&self.members) {
                if decodes(view) && member.state() == WorkerState::Ready {
                    view.state = WorkerState::Ready;
                }
            }
        }
        views
    }

    /// How KV is laid out, as the workers agree; `None` before any was heard of.
    fn layout(&self) -> Option<KvLayout> {
        self.members.iter().find_map(|member| member.layout())
    }

    /// Of the largest ready decode worker; `None` without one.
    pub(crate) fn largest(&self) -> Option<Capacity> {
        let block_size = self.layout()?.block_size as u64;
        let ready = |view: &WorkerView| view.role == Role::Decode && view.state == WorkerState::Ready;
        let blocks = self.views().into_iter().filter(ready).map(|view| u64::from(view.total_blocks)).max()?;
        Some(Capacity { blocks, block_size })
    }

    /// Tokens of prompt and output that every usable worker can hold; `None` before any was heard of.
    pub(crate) fn context(&self) -> Option<u32> {
        self.members.iter().filter_map(|member| member.context()).min()
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

    /// How many prefill and decode workers are ready.
    pub(crate) fn num_ready(&self) -> (u32, u32) {
        let ready = |role| {
            let is_ready =
                |member: &&Arc<Member>| member.role == role && member.state() == WorkerState::Ready;
            u32::try_from(self.members.iter().filter(is_ready).count()).unwrap_or(u32::MAX)
        };
        (ready(Role::Prefill), ready(Role::Decode))
    }

    /// Workers of each role that get no requests because they kept failing them, for the scrape.
    pub(crate) fn open_breakers(&self) -> Vec<(&'static str, u64)> {
        let open = |role| {
            self.members.iter().filter(|member| member.role == role && member.is_shunned()).count() as u64
        };
        [Role::Prefill, Role::Decode].map(|role| (role_name(role), open(role))).to_vec()
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
