//! One worker, as this router sees it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_dispatch::{Breaker, BreakerLimits, Role, WorkerState, WorkerView};
use baton_handoff::InstanceId;
use baton_kv::KvLayout;
use baton_proto::v1;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};

use super::agreement::Description;
use super::{Patience, Report, role_name};
use crate::RouterError;

/// A connection that can't be made within this time is not made.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// An idle connection is probed, so that one that was dropped in between is found before a request is.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A worker and the connection that its requests take; status has one of its own.
pub(crate) struct Member {
    pub(crate) role: Role,
    pub(crate) address: String,
    pub(super) endpoint: Endpoint,
    legs: Channel,
    num_legs: Arc<AtomicU32>,
    /// Counts how often this worker was lost; streams opened before end at the next change.
    losses: watch::Sender<u64>,
    /// Origin of the breaker's time.
    since: Instant,
    state: Mutex<State>,
}

struct State {
    description: Option<Description>,
    refusal: Option<String>,
    status: Option<v1::WorkerStatus>,
    /// Why nothing is heard of it, while nothing is.
    silence: Option<String>,
    /// Set once the silence lasted, until it speaks again.
    lost: bool,
    heard_at: Instant,
    progress_at: Instant,
    ever_heard: bool,
    /// Of the process that answers here.
    breaker: Breaker,
}

/// Counts a request of this router on a worker until it is dropped.
pub(crate) struct InFlight(Arc<AtomicU32>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Member {
    /// A worker that was never heard of.
    pub(crate) fn new(role: Role, address: String) -> Result<Self, RouterError> {
        let now = Instant::now();
        let option = match role {
            Role::Prefill => "--prefill-worker",
            Role::Decode => "--decode-worker",
        };
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| RouterError::config(option, format!("'{address}' is not host:port: {error}")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        Ok(Self {
            role,
            address,
            legs: endpoint.connect_lazy(),
            num_legs: Arc::default(),
            endpoint,
            losses: watch::Sender::new(0),
            since: now,
            state: Mutex::new(State {
                description: None,
                refusal: None,
                status: None,
                silence: Some("not heard of yet".to_owned()),
                lost: false,
                heard_at: now,
                progress_at: now,
                ever_heard: false,
                breaker: Breaker::new(BreakerLimits::default()),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection for legs.
    pub(crate) fn channel(&self) -> Channel {
        self.legs.clone()
    }

    /// Counts one more request here.
    pub(crate) fn enter(&self) -> InFlight {
        self.num_legs.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(&self.num_legs))
    }

    /// A request goes there now.
    pub(super) fn begin(&self) {
        self.lock().breaker.begin(self.since.elapsed());
    }

    /// The process that answers there.
    pub(crate) fn instance(&self) -> InstanceId {
        self.lock().instance()
    }

    /// This process answered a leg.
    pub(crate) fn answered(&self, process: InstanceId) {
        let mut state = self.lock();
        if state.instance() == process {
            state.breaker.succeeded();
        }
    }

    /// A leg to this process could not be opened, or broke.
    pub(crate) fn broke(&self, process: InstanceId) {
        let now = self.since.elapsed();
        let opened = {
            let mut state = self.lock();
            if state.instance() != process {
                return;
            }
            let before = state.breaker.is_open(now);
            state.breaker.failed(now);
            state.breaker.is_open(now) && !before
        };
        if opened {
            tracing::warn!(worker = %self.address, worker_role = role_name(self.role), "a worker keeps failing requests: it gets none for a while");
        }
    }

    /// Whether it gets no requests because it kept failing them.
    pub(super) fn is_shunned(&self) -> bool {
        self.lock().breaker.is_open(self.since.elapsed())
    }

    /// Resolves when this worker is lost or another process takes its place.
    pub(crate) fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut losses = self.losses.subscribe();
        async move {
            // The sender lives as long as the fleet.
            let _ = losses.changed().await;
        }
    }

    pub(super) fn description(&self) -> Option<Description> {
        self.lock().description.clone()
    }

    /// Takes in what the worker said of itself; another process than before ends the streams of the old one.
    pub(super) fn describe(&self, description: Description) {
        let replaced = {
            let mut state = self.lock();
            let before = state.description.as_ref().map(|description| description.instance);
            let replaced = before.is_some_and(|before| before != description.instance);
            if replaced {
                state.status = None;
                state.breaker = Breaker::new(BreakerLimits::default());
            }
            state.description = Some(description);
            replaced
        };
        if replaced {
            tracing::warn!(worker = %self.address, worker_role = role_name(self.role), "another process answers at this worker's address");
            self.losses.send_modify(|count| *count += 1);
        }
    }

    pub(super) fn set_refusal(&self, refusal: Option<String>) {
        let mut state = self.lock();
        if state.refusal != refusal {
            match &refusal {
                Some(reason) => tracing::error!(worker = %self.address, reason, "worker refused"),
                None => tracing::info!(worker = %self.address, "worker no longer refused"),
            }
        }
        state.refusal = refusal;
    }

    /// Takes in a status.
    pub(super) fn hear(&self, status: v1::WorkerStatus, now: Instant) {
        let mut state = self.lock();
        let moved = state.status.as_ref().is_none_or(|before| before.progress != status.progress);
        if moved || status.idle {
            state.progress_at = now;
        }
        let before = state.status.as_ref().map(|status| status.state);
        if state.silence.take().is_some() || before != Some(status.state) {
            let name = status.state().as_str_name().trim_start_matches("STATE_").to_lowercase();
            tracing::info!(worker = %self.address, worker_role = role_name(self.role), state = name, "worker state");
        }
        state.lost = false;
        state.ever_heard = true;
        state.heard_at = now;
        state.status = Some(status);
    }

    /// The status stream ended: nothing new is placed there until it speaks again.
    pub(super) fn fall_silent(&self, reason: &str) {
        let mut state = self.lock();
        if state.silence.is_none() {
            tracing::warn!(worker = %self.address, worker_role = role_name(self.role), reason, "worker not reachable");
        }
        state.silence = Some(reason.to_owned());
    }

    /// Declares the worker lost when it was silent, or stood still, for too long: its streams end.
    pub(super) fn check_patience(&self, now: Instant, patience: Patience) {
        let reason = {
            let mut state = self.lock();
            if state.lost || !state.ever_heard {
                return;
            }
            let silent = now.saturating_duration_since(state.heard_at);
            let still = now.saturating_duration_since(state.progress_at);
            let works = state
                .status
                .as_ref()
                .is_some_and(|status| !status.idle && status.state() == v1::worker_status::State::Ready);
            let reason = if silent >= patience.heartbeat_timeout {
                format!("no heartbeat for {:.1} s", silent.as_secs_f64())
            } else if works && still >= patience.stall_timeout {
                format!("no progress for {:.1} s", still.as_secs_f64())
            } else {
                return;
            };
            state.lost = true;
            if state.silence.is_none() {
                state.silence = Some(reason.clone());
            }
            reason
        };
        tracing::warn!(worker = %self.address, worker_role = role_name(self.role), reason, "worker lost");
        self.losses.send_modify(|count| *count += 1);
    }

    /// Whether it can be used.
    pub(super) fn state(&self) -> WorkerState {
        self.lock().worker_state()
    }

    /// A worker of this role that was never heard of.
    pub(super) fn is_awaited(&self, role: Role) -> bool {
        self.role == role && !self.lock().ever_heard
    }

    pub(super) fn view(&self, index: usize) -> WorkerView {
        let state = self.lock();
        let view = WorkerView {
            instance: state.instance(),
            index,
            role: self.role,
            state: match state.worker_state() {
                WorkerState::Ready if state.breaker.is_open(self.since.elapsed()) => WorkerState::Unreachable,
                other => other,
            },
            num_waiting: 0,
            num_running: 0,
            free_blocks: 0,
            total_blocks: 0,
            queued_tokens: 0,
            in_flight: self.num_legs.load(Ordering::Relaxed),
            prefill_tokens_per_s: 0.0,
            decode_step_ms: 0.0,
        };
        let Some(status) = &state.status else { return view };
        WorkerView {
            num_waiting: status.num_waiting,
            num_running: status.num_running,
            free_blocks: status.free_blocks.saturating_add(status.cached_blocks),
            total_blocks: status.total_blocks,
            queued_tokens: status.queued_tokens,
            prefill_tokens_per_s: status.prefill_tokens_per_s,
            decode_step_ms: status.decode_step_ms,
            ..view
        }
    }

    /// How its KV is laid out, unless it is refused, silent or still loading.
    pub(super) fn layout(&self) -> Option<KvLayout> {
        self.lock().usable().map(|(_, layout)| layout.clone())
    }

    /// What its bits depend on beside its input, as far as it said.
    pub(crate) fn numerics_id(&self) -> Option<String> {
        let state = self.lock();
        let layout = state.description.as_ref()?.layout.as_ref()?;
        layout.as_ref().ok().map(|layout| layout.numerics_id.clone())
    }

    /// Tokens of prompt and output that it can hold, unless it is refused, silent or still loading.
    pub(super) fn context(&self) -> Option<u32> {
        let state = self.lock();
        let (description, layout) = state.usable()?;
        let block_size = u32::try_from(layout.block_size).ok()?;
        Some(description.context.min(description.num_blocks.saturating_mul(block_size)))
    }

    pub(super) fn report(&self) -> Report {
        let state = self.lock();
        let (name, reason) = match (&state.silence, &state.refusal, state.worker_state()) {
            (Some(reason), _, _) => ("unreachable", Some(reason.clone())),
            (None, Some(reason), _) => ("refused", Some(reason.clone())),
            (None, None, WorkerState::Loading) => ("loading", None),
            (None, None, WorkerState::Ready) => ("ready", None),
            (None, None, WorkerState::Draining) => ("draining", None),
            (None, None, WorkerState::Failed) => ("failed", None),
            (None, None, WorkerState::Unreachable) => ("unreachable", None),
        };
        Report { address: self.address.clone(), role: role_name(self.role), state: name, reason }
    }
}

impl State {
    fn instance(&self) -> InstanceId {
        self.description.as_ref().map_or(InstanceId([0; 16]), |description| description.instance)
    }

    fn usable(&self) -> Option<(&Description, &KvLayout)> {
        if self.refusal.is_some() || self.silence.is_some() {
            return None;
        }
        let description = self.description.as_ref()?;
        Some((description, description.layout.as_ref()?.as_ref().ok()?))
    }

    fn worker_state(&self) -> WorkerState {
        use v1::worker_status::State as Wire;
        if self.silence.is_some() {
            return WorkerState::Unreachable;
        }
        if self.refusal.is_some() {
            return WorkerState::Failed;
        }
        let has_layout = self.description.as_ref().is_some_and(|description| description.layout.is_some());
        match self.status.as_ref().map(v1::WorkerStatus::state) {
            None | Some(Wire::Unspecified) => WorkerState::Unreachable,
            Some(Wire::Loading) => WorkerState::Loading,
            Some(Wire::Ready) if !has_layout => WorkerState::Loading,
            Some(Wire::Ready) => WorkerState::Ready,
            Some(Wire::Draining) => WorkerState::Draining,
            Some(Wire::Failed) => WorkerState::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_kv::KvDtype;

    use super::*;

    fn description(process: u8) -> Description {
        Description {
            address: "d:1".to_owned(),
            expected_role: Role::Decode,
            instance: InstanceId([process; 16]),
            role: Some(Role::Decode),
            layout: Some(Ok(KvLayout {
                model_digest: [7; 32],
                num_layers: 4,
                num_kv_heads: 2,
                head_dim: 16,
                block_size: 16,
                dtype: KvDtype::F16,
                arrangement: "a".to_owned(),
                numerics_id: "n".to_owned(),
            })),
            protocol_version: baton_proto::PROTOCOL_VERSION,
            context: 100,
            num_blocks: 10,
        }
    }

    #[tokio::test]
    async fn a_process_that_keeps_failing_is_left_out_and_the_next_one_is_not() {
        let member = Member::new(Role::Decode, "d:1".to_owned()).expect("an address");
        let status =
            v1::WorkerStatus { state: v1::worker_status::State::Ready.into(), ..v1::WorkerStatus::default() };
        let state = || member.view(0).state;
        member.describe(description(1));
        member.hear(status.clone(), Instant::now());
        assert_eq!(state(), WorkerState::Ready);
        let (first, second) = (InstanceId([1; 16]), InstanceId([2; 16]));
        for _ in 0..BreakerLimits::default().max_failures {
            assert_eq!(state(), WorkerState::Ready);
            member.broke(second);
            member.broke(first);
        }
        assert_eq!(state(), WorkerState::Unreachable, "no request goes there");
        assert_eq!(member.state(), WorkerState::Ready, "and yet its status is read");
        member.describe(description(2));
        member.hear(status, Instant::now());
        for _ in 0..BreakerLimits::default().max_failures {
            member.broke(first);
        }
        assert_eq!(state(), WorkerState::Ready, "its legs broke with the process before");
    }
}
