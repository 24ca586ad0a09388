//! From the step loop to the sender of KV.

use std::ops::Range;

use baton_transfer::Progress;
use baton_worker::LayerSink;

/// Tells the sender what the step loop computed.
pub(crate) struct ProgressSink(pub(crate) Progress);

impl LayerSink for ProgressSink {
    fn layer_done(&self, chunk: Range<usize>, layer: usize) {
        self.0.layer_done(chunk, layer);
    }

    fn tokens_done(&self, num_tokens: usize) {
        self.0.tokens_done(num_tokens);
    }
}
