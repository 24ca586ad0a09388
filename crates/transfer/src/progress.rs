//! How far computing is: written by the step thread, read by the sender.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Largest prompt whose progress can be told, in tokens.
pub const MAX_TOKENS: usize = (1 << TOKEN_BITS) - 1;

const TOKEN_BITS: u32 = 24;
const LAYER_BITS: u32 = 16;

/// What is computed of one prompt; cloned into the step loop. Telling it takes one atomic store and never waits or allocates.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Tokens complete, end of the chunk under way, its layers done: 24, 24 and 16 bits.
    state: AtomicU64,
    wake: Notify,
}

/// One reading of a [`Progress`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Computed {
    /// Leading tokens whose KV is complete in all layers.
    pub(crate) tokens: usize,
    /// End of the chunk under way.
    pub(crate) chunk_end: usize,
    /// Leading layers in which that chunk's KV is complete.
    pub(crate) chunk_layers: usize,
}

impl Progress {
    /// Nothing is computed.
    pub fn new() -> Self {
        Self::default()
    }

    /// From the step thread, after `layer` wrote the KV of the tokens `chunk`; layers come in order, and every token
    /// before `chunk` is complete. The last layer's call is followed by [`Progress::tokens_done`].
    pub fn layer_done(&self, chunk: Range<usize>, layer: usize) {
        self.set(Computed { tokens: chunk.start, chunk_end: chunk.end, chunk_layers: layer + 1 });
    }

    /// The KV of the first `num_tokens` tokens is complete in all layers: a chunk ended, or a prefix cache held it.
    pub fn tokens_done(&self, num_tokens: usize) {
        self.set(Computed { tokens: num_tokens, chunk_end: num_tokens, chunk_layers: 0 });
    }

    fn set(&self, at: Computed) {
        // Out of range can't be told; the span was checked against the limit before anything is sent, so clamping loses nothing.
        let [tokens, chunk_end] = [at.tokens, at.chunk_end].map(|n| n.min(MAX_TOKENS) as u64);
        let layers = at.chunk_layers.min((1 << LAYER_BITS) - 1) as u64;
        let state = tokens << (TOKEN_BITS + LAYER_BITS) | chunk_end << LAYER_BITS | layers;
        // Release: whoever reads this state sees the KV that was written before it.
        self.shared.state.store(state, Ordering::Release);
        self.wake();
    }

    pub(crate) fn get(&self) -> Computed {
        let state = self.shared.state.load(Ordering::Acquire);
        Computed {
            tokens: (state >> (TOKEN_BITS + LAYER_BITS)) as usize,
            chunk_end: (state >> LAYER_BITS) as usize & MAX_TOKENS,
            chunk_layers: state as usize & ((1 << LAYER_BITS) - 1),
        }
    }

    /// Wakes the one sender that reads this.
    pub(crate) fn wake(&self) {
        self.shared.wake.notify_one();
    }

    pub(crate) async fn changed(&self) {
        self.shared.wake.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_read() {
        let progress = Progress::new();
        assert_eq!(progress.get(), Computed::default());
        progress.layer_done(4096..131_072, 79);
        assert_eq!(progress.get(), Computed { tokens: 4096, chunk_end: 131_072, chunk_layers: 80 });
        progress.tokens_done(MAX_TOKENS);
        assert_eq!(progress.get(), Computed { tokens: MAX_TOKENS, chunk_end: MAX_TOKENS, chunk_layers: 0 });
    }

    #[tokio::test]
    async fn a_change_before_waiting_is_not_missed() {
        let progress = Progress::new();
        progress.tokens_done(1);
        progress.changed().await;
    }
}
