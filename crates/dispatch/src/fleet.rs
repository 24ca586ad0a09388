//! What a router knows of the workers: their state and load, and how fast KV moves between them.

use std::collections::HashMap;

use baton_handoff::InstanceId;

use crate::CacheIndex;
use crate::uniform::Uniform;

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
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerView {
    /// Its process.
    pub instance: InstanceId,
    /// The router's handle for it; the [`CacheIndex`] knows it by this number too.
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
    /// Measured rate of computing prompts; 0: unknown.
    pub prefill_tokens_per_s: f64,
    /// Measured time of a step that only decodes; 0: unknown.
    pub decode_step_ms: f64,
}

impl WorkerView {
    /// Requests there, as far as anybody knows.
    pub(crate) fn num_requests(&self) -> u64 {
        u64::from(self.in_flight) + u64::from(self.num_waiting) + u64::from(self.num_running)
    }

    /// Requests of this router that the worker's status does not count yet.
    pub(crate) fn num_unseen(&self) -> u32 {
        self.in_flight.saturating_sub(self.num_waiting.saturating_add(self.num_running))
    }

    /// Less is better: requests first, then uncomputed tokens, then the index, so that equal fleets give equal answers.
    pub(crate) fn load(&self) -> (u64, u64, usize) {
        (self.num_requests(), self.queued_tokens, self.index)
    }
}

/// Bytes per second of a link that was never measured.
pub const DEFAULT_LINK_BYTES_PER_S: f64 = 1e9;

/// One measured link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkView {
    /// The decode worker that receives.
    pub decode: InstanceId,
    /// Bytes per second while any were outstanding.
    pub bytes_per_s: f64,
}

/// How fast KV moves from a prefill worker to a decode worker, as prefill workers measured it.
#[derive(Clone, Debug, Default)]
pub struct Links {
    rows: HashMap<InstanceId, HashMap<InstanceId, f64, Uniform>, Uniform>,
}

impl Links {
    /// Everything a prefill worker measured; replaces what it said before. What is not a positive number is left out.
    pub fn set(&mut self, prefill: InstanceId, links: impl IntoIterator<Item = LinkView>) {
        let measured =
            links.into_iter().filter(|link| link.bytes_per_s > 0.0 && link.bytes_per_s.is_finite());
        let row: HashMap<_, _, _> = measured.map(|link| (link.decode, link.bytes_per_s)).collect();
        if row.is_empty() {
            self.rows.remove(&prefill);
        } else {
            self.rows.insert(prefill, row);
        }
    }

    /// The prefill worker is gone: what it measured is void.
    pub fn forget(&mut self, prefill: InstanceId) {
        self.rows.remove(&prefill);
    }

    /// Bytes per second; [`DEFAULT_LINK_BYTES_PER_S`] for a link that was not measured.
    pub fn bytes_per_s(&self, prefill: InstanceId, decode: InstanceId) -> f64 {
        self.row(prefill).bytes_per_s(decode)
    }

    pub(crate) fn row(&self, prefill: InstanceId) -> LinkRow<'_> {
        LinkRow(self.rows.get(&prefill))
    }
}

/// The links of one prefill worker.
#[derive(Clone, Copy)]
pub(crate) struct LinkRow<'a>(Option<&'a HashMap<InstanceId, f64, Uniform>>);

impl LinkRow<'_> {
    pub(crate) fn bytes_per_s(self, decode: InstanceId) -> f64 {
        self.0.and_then(|row| row.get(&decode)).copied().unwrap_or(DEFAULT_LINK_BYTES_PER_S)
    }
}

/// Everything placement looks at.
#[derive(Clone, Copy, Debug)]
pub struct Fleet<'a> {
    /// The workers; no two with the same `index`.
    pub workers: &'a [WorkerView],
    /// Which blocks they have cached.
    pub cache: &'a CacheIndex,
    /// How they are connected.
    pub links: &'a Links,
}
