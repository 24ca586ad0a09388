//! Where the time of a request went, by its spans alone.

use baton_tests::spans::{Kind, Trace};

/// Milliseconds, each from a span's own duration.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) end_to_end: f64,
    router: f64,
    queue: f64,
    prefill: f64,
    exposed: f64,
    decode_queue: f64,
    /// All KV was there, and the commit on its way.
    commit: f64,
    decode: f64,
    /// What calls took beyond what the called spent on them.
    pub(crate) network: f64,
}

impl Account {
    /// Of a request that was handed off once.
    pub(crate) fn new(trace: &Trace) -> Self {
        let sum = |name: &str| trace.named(name).map(|span| span.ms()).sum::<f64>();
        let called = |name: &str| (trace.one(name, Kind::Client).ms(), trace.one(name, Kind::Server).ms());
        let (prefill_call, prefill) = called("prefill");
        let (decode_call, decode) = called("decode");
        let queue = sum("prefill.queue");
        Self {
            end_to_end: trace.root().ms(),
            router: ["read", "door", "tokenize", "route", "respond"].map(sum).iter().sum(),
            queue,
            prefill: prefill - queue,
            exposed: sum("kv.wait"),
            decode_queue: sum("decode.queue"),
            commit: sum("decode.commit"),
            decode: sum("decode.run"),
            network: (prefill_call - prefill) + (decode_call - decode),
        }
    }

    /// What no span tells of.
    pub(crate) fn rest(&self) -> f64 {
        let told = self.router
            + self.queue
            + self.prefill
            + self.exposed
            + self.decode_queue
            + self.commit
            + self.decode
            + self.network;
        self.end_to_end - told
    }
}
