//! Where a request runs: a small pure problem.
//!
//! Properties: the answer depends on `views` and `need` alone; only ready workers of the right role that could ever hold
//! the request are chosen; among them the least loaded, ties by the lower index; a worker to avoid is
//! chosen only when there is no other; no ready prefill worker means `local`, never an error.

use baton_handoff::InstanceId;

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Computes prompts.
    Prefill,
    /// Generates tokens; can compute prompts too.
    Decode,
}

/// A worker's state, as the fleet view knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkerState {
    /// The model loads.
    Loading,
    /// Takes work.
    Ready,
    /// Takes no new work.
    Draining,
    /// Said that it failed.
    Failed,
    /// Can't be reached, or was never heard of.
    Unreachable,
}

/// One worker in the fleet view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerView {
    /// Its process.
    pub instance: InstanceId,
    /// The router's handle for it.
    pub index: usize,
    /// What it does.
    pub role: Role,
    /// Whether it takes work.
    pub state: WorkerState,
    /// Requests in its queue.
    pub num_waiting: u32,
    /// Prefilling on a prefill worker, running on a decode worker.
    pub num_running: u32,
    /// KV blocks allocatable now.
    pub free_blocks: u32,
    /// All KV blocks.
    pub total_blocks: u32,
    /// Prompt tokens accepted and not yet computed.
    pub queued_tokens: u64,
    /// This router's own requests there that its status may not show yet.
    pub in_flight: u32,
}

impl WorkerView {
    /// Less is better: requests first, then uncomputed tokens, then the index, so that equal fleets give equal answers.
    fn load(&self) -> (u64, u64, usize) {
        let requests = u64::from(self.in_flight) + u64::from(self.num_waiting) + u64::from(self.num_running);
        (requests, self.queued_tokens, self.index)
    }
}

/// What a request needs of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Need<'a> {
    /// Tokens of the prompt, forced ones included.
    pub prompt_tokens: u32,
    /// Tokens to generate at most.
    pub max_new_tokens: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Requests waiting on a worker from which on it gets no more.
    pub max_waiting: u32,
    /// Workers that failed this request.
    pub avoid: &'a [InstanceId],
}

impl Need<'_> {
    fn blocks(&self) -> u64 {
        let tokens = u64::from(self.prompt_tokens) + u64::from(self.max_new_tokens);
        tokens.div_ceil(u64::from(self.block_size.max(1)))
    }
}

/// How the fleet is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Prefill and decode on separate workers.
    Disaggregated,
    /// Decode workers do everything: the baseline.
    Colocated,
}

/// How a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Prefill and decode on separate workers.
    Disaggregated,
    /// On one worker although the policy is disaggregated.
    Local,
    /// On one worker by policy.
    Colocated,
}

impl Mode {
    /// A stable name for metrics, headers and spans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disaggregated => "disaggregated",
            Self::Local => "local",
            Self::Colocated => "colocated",
        }
    }
}

/// Where a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// `index` of the decode worker.
    pub decode: usize,
    /// `index` of the prefill worker.
    pub prefill: Option<usize>,
    /// How.
    pub mode: Mode,
    /// Why this mode, for people: "policy" or "no_prefill_worker".
    pub reason: &'static str,
}

/// Why a request can't be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum PlaceError {
    /// Wait for one, or fail as unavailable.
    #[error("no decode worker is ready")]
    NoWorker,
    /// Shed.
    #[error("every decode worker has a full queue")]
    Saturated,
    /// Refuse: it can never fit.
    #[error("the request needs more KV blocks than any ready decode worker has")]
    TooLarge,
}

/// Chooses the workers for one attempt.
///
/// # Errors
/// [`PlaceError`].
pub fn place(views: &[WorkerView], need: &Need<'_>, policy: Policy) -> Result<Placement, PlaceError> {
    let decode = choose_decode(views, need)?;
    if policy == Policy::Colocated {
        return Ok(Placement { decode, prefill: None, mode: Mode::Colocated, reason: "policy" });
    }
    let prefill_blocks = u64::from(need.prompt_tokens).div_ceil(u64::from(need.block_size.max(1)));
    let prefill = least_loaded(
        ready(views, Role::Prefill).filter(|view| u64::from(view.total_blocks) >= prefill_blocks),
        need.avoid,
    );
    Ok(match prefill {
        Some(view) => {
            Placement { decode, prefill: Some(view.index), mode: Mode::Disaggregated, reason: "policy" }
        }
        None => Placement { decode, prefill: None, mode: Mode::Local, reason: "no_prefill_worker" },
    })
}

fn choose_decode(views: &[WorkerView], need: &Need<'_>) -> Result<usize, PlaceError> {
    if ready(views, Role::Decode).next().is_none() {
        return Err(PlaceError::NoWorker);
    }
    let large_enough =
        || ready(views, Role::Decode).filter(|view| u64::from(view.total_blocks) >= need.blocks());
    if large_enough().next().is_none() {
        return Err(PlaceError::TooLarge);
    }
    least_loaded(large_enough().filter(|view| view.num_waiting < need.max_waiting), need.avoid)
        .map(|view| view.index)
        .ok_or(PlaceError::Saturated)
}

fn ready(views: &[WorkerView], role: Role) -> impl Iterator<Item = &WorkerView> {
    views.iter().filter(move |view| view.role == role && view.state == WorkerState::Ready)
}

fn least_loaded<'a>(
    candidates: impl Iterator<Item = &'a WorkerView>,
    avoid: &[InstanceId],
) -> Option<&'a WorkerView> {
    candidates.min_by_key(|view| (avoid.contains(&view.instance), view.load()))
}
