//! What a step is expected to take.

/// Seconds of a step: `fixed_s + per_token_s * tokens + per_context_token_s * context`, where context is, summed over all new tokens,
/// the number of tokens each attends over. Fitted by the shell from steps that ran, or taken from a roofline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Of every step.
    pub fixed_s: f64,
    /// Of a new token.
    pub per_token_s: f64,
    /// Of one token that a new one attends over.
    pub per_context_token_s: f64,
}

/// What a plan holds so far, as [`StepCost`] counts it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepLoad {
    tokens: f64,
    context: f64,
    /// Rows of prompts.
    pub(crate) num_chunks: usize,
}

impl StepLoad {
    /// Adds `num_tokens` new tokens of one sequence, the first of them at `position`.
    pub(crate) fn add(&mut self, position: usize, num_tokens: usize) {
        let (position, tokens) = (position as f64, num_tokens as f64);
        self.tokens += tokens;
        self.context += tokens * position + tokens * (tokens + 1.0) / 2.0;
    }

    /// Adds `share` of a row of one token.
    pub(crate) fn add_part(&mut self, position: usize, share: f64) {
        self.tokens += share;
        self.context += share * (position + 1) as f64;
    }

    /// Whether nothing was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens == 0.0
    }
}

impl StepCost {
    /// Seconds of a step.
    pub(crate) fn seconds(&self, load: &StepLoad) -> f64 {
        self.fixed_s + self.per_token_s * load.tokens + self.per_context_token_s * load.context
    }

    /// Seconds that a prompt of so many tokens adds to a step.
    pub(crate) fn prompt_seconds(&self, num_tokens: usize) -> f64 {
        let mut load = StepLoad::default();
        load.add(0, num_tokens);
        self.seconds(&load) - self.fixed_s
    }

    /// The largest number of new tokens from `position` on, up to `most`, with which a step of `load` takes at most `max_s` seconds.
    pub(crate) fn tokens_within(&self, max_s: f64, load: &StepLoad, position: usize, most: usize) -> usize {
        let fits = |num_tokens: usize| {
            let mut load = *load;
            load.add(position, num_tokens);
            self.seconds(&load) <= max_s
        };
        let (mut fit, mut beyond) = (0, most + 1);
        while beyond - fit > 1 {
            let middle = fit.midpoint(beyond);
            if fits(middle) {
                fit = middle;
            } else {
                beyond = middle;
            }
        }
        fit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_as_long_as_its_context_allows() {
        let cost = StepCost { fixed_s: 1.0, per_token_s: 0.5, per_context_token_s: 0.25 };
        let mut load = StepLoad::default();
        load.add(3, 1); // attends over 4
        assert!((cost.seconds(&load) - 2.5).abs() < 1e-12);
        // Two tokens at 0 attend over 1 and 2: one second and three quarters.
        assert_eq!(cost.tokens_within(4.25, &load, 0, 100), 2);
        assert_eq!(cost.tokens_within(4.24, &load, 0, 100), 1);
        assert_eq!(cost.tokens_within(4.25, &load, 100, 100), 0);
        assert_eq!(cost.tokens_within(1e9, &load, 0, 7), 7);
    }
}
