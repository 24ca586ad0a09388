//! How long steps take, and how a worker cuts prompts into them.

use baton_timing::{ModelShape, Roofline};

use crate::PlanInput;

/// How workers are configured: what `baton` workers take by default on GPUs.
pub(crate) const BLOCK_TOKENS: u32 = 16;
/// Tokens of a step of a prefill worker.
pub(crate) const MAX_STEP_TOKENS: u32 = 2_048;
/// Expected milliseconds of a step with prompt tokens, at most.
pub(crate) const MAX_STEP_MS: f64 = 100.0;
/// Prompts of one step of a prefill worker.
pub(crate) const MAX_OPEN_PROMPTS: usize = 4;
/// Sequences of a worker.
pub(crate) const MAX_NUM_SEQS: u32 = 256;
/// Shortest and longest time of a message, in microseconds.
pub(crate) const LATENCY_US: (u64, u64) = (20, 60);
/// Mean time of a message, in seconds.
pub(crate) const HOP_S: f64 = 40e-6;

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    /// New tokens.
    pub(crate) tokens: f64,
    /// For each of them, the tokens that it attends over.
    pub(crate) attended: f64,
    /// For each sequence, the tokens whose KV is read.
    pub(crate) context: f64,
}

impl Work {
    /// A decoding step of `batch` sequences with `context` tokens each.
    pub(crate) fn decode(batch: f64, context: f64) -> Self {
        Self { tokens: batch, attended: batch * context, context: batch * context }
    }

    /// With a chunk of a prompt that begins at `position`.
    pub(crate) fn with_chunk(self, position: u32, tokens: u32) -> Self {
        let (position, tokens) = (f64::from(position), f64::from(tokens));
        Self {
            tokens: self.tokens + tokens,
            attended: self.attended + position * tokens + tokens * (tokens + 1.0) / 2.0,
            context: self.context + position + tokens,
        }
    }
}

/// A device with a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    roofline: Roofline,
    shape: ModelShape,
    /// Tokens of an average sequence while it decodes.
    context: f64,
}

impl Steps {
    pub(crate) fn new(input: &PlanInput) -> Self {
        let context = f64::from(input.input_tokens) + f64::from(input.output_tokens) / 2.0;
        Self { roofline: input.device.roofline(), shape: input.model.shape, context }
    }

    /// Seconds of a step.
    pub(crate) fn seconds(&self, work: &Work) -> f64 {
        self.roofline.seconds(&self.shape, [work.tokens, work.attended, work.context])
    }

    /// What a step with `batch` decoding sequences computes.
    pub(crate) fn decoding(&self, batch: f64) -> Work {
        Work::decode(batch, self.context)
    }

    /// Seconds of a step with `batch` decoding sequences and nothing else.
    pub(crate) fn decode(&self, batch: f64) -> f64 {
        self.seconds(&self.decoding(batch))
    }

    /// Tokens of a prompt's next chunk, of `left` tokens from `position` on, in a step that has `work` already and room for `budget` tokens more.
    /// 0: none fits; a step without any prompt token takes one block in any case.
    pub(crate) fn chunk(&self, work: &Work, position: u32, left: u32, budget: u32, is_first: bool) -> u32 {
        let cost = self.roofline.step_cost(&self.shape);
        let fits = |tokens: u32| {
            let work = work.with_chunk(position, tokens);
            let seconds =
                cost.fixed_s + cost.per_token_s * work.tokens + cost.per_context_token_s * work.attended;
            seconds * 1e3 <= MAX_STEP_MS
        };
        let most = left.min(budget);
        // Mostly time is no bound.
        let (mut fit, mut beyond) = if fits(most) { (most, most + 1) } else { (0, most) };
        while beyond - fit > 1 {
            let middle = fit.midpoint(beyond);
            if fits(middle) {
                fit = middle;
            } else {
                beyond = middle;
            }
        }
        // A chunk that is not the prompt's last one ends with a block.
        let whole = if fit == left { fit } else { fit / BLOCK_TOKENS * BLOCK_TOKENS };
        if whole == 0 && is_first { left.min(BLOCK_TOKENS) } else { whole }
    }

    /// How many steps of at most `budget` prompt tokens, each beside `beside`, a prompt of `tokens` tokens takes alone, and the seconds of all.
    pub(crate) fn prompt_steps(&self, beside: &Work, tokens: u32, budget: u32) -> (u32, f64) {
        let (mut position, mut num, mut seconds) = (0, 0, 0.0);
        while position < tokens {
            let chunk = self.chunk(beside, position, tokens - position, budget, true);
            seconds += self.seconds(&beside.with_chunk(position, chunk));
            position += chunk;
            num += 1;
        }
        (num, seconds)
    }

    /// The seconds alone.
    pub(crate) fn prompt(&self, beside: &Work, tokens: u32, budget: u32) -> f64 {
        self.prompt_steps(beside, tokens, budget).1
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_timing::StepWork;

    use super::*;
    use crate::input::tests::input;

    #[test]
    fn steps_are_the_rooflines() {
        let (input, steps) = (input(), Steps::new(&input()));
        let work = StepWork { num_tokens: 8, num_attended: 8 * 2_112, num_context: 8 * 2_112 };
        let expected = input.device.roofline().step_time(&input.model.shape, &work);
        let off = Duration::from_secs_f64(steps.decode(8.0)).abs_diff(expected);
        assert!(off < Duration::from_nanos(2), "{off:?}");
        // One chunk: 2,048 tokens at 0.6 of 989 Tflop/s, with attention.
        let alone = steps.prompt(&Work::default(), 2_048, MAX_STEP_TOKENS);
        assert!((alone - 57.5e-3).abs() < 1e-3, "{alone}");
    }

    #[test]
    fn chunks_end_with_blocks_and_within_the_time() {
        let steps = Steps::new(&input());
        let none = Work::default();
        assert_eq!(steps.chunk(&none, 0, 2_000, 2_048, true), 2_000);
        assert_eq!(steps.chunk(&none, 0, 5_000, 2_047, true), 2_032);
        assert_eq!(steps.chunk(&none.with_chunk(0, 2_048), 0, 500, 0, false), 0);
        let slow = Steps { roofline: Roofline { flops_per_s: 1e14, ..steps.roofline }, ..steps };
        let chunk = slow.chunk(&none, 0, 5_000, 2_048, true);
        assert!(chunk.is_multiple_of(16) && (500..640).contains(&chunk), "{chunk}");
        assert!(slow.seconds(&none.with_chunk(0, chunk)) * 1e3 <= MAX_STEP_MS);
        let slowest = Steps { roofline: Roofline { flops_per_s: 1e9, ..steps.roofline }, ..steps };
        assert_eq!(slowest.chunk(&none, 0, 5_000, 2_048, true), 16);
        assert_eq!(slowest.chunk(&none, 0, 5_000, 2_048, false), 0);
    }
}
