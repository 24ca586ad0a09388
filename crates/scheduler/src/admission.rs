//! Who may take blocks now. One formula, from the design:
//!
//! * feasible: `blocks(min(prompt + max_tokens, context)) <= total`;
//! * admit: need of the prompt + estimated growth of all running and receiving sequences
//!   `<= free - one block per running sequence`.
//!
//! The estimated growth of one sequence is `min(tokens left, 4096, rho * q90)`, where q90 is the 0.9 quantile of observed outputs
//! and rho decays from 0.7 to 0.1 over 600 steps without preemption and jumps back on one.

const RHO_MAX: f64 = 0.7;
const RHO_MIN: f64 = 0.1;
const RHO_STEPS: f64 = 600.0;
const GROWTH_CAP: usize = 4096;
const OUTPUT_GUESS: usize = 256;
const WINDOW: usize = 128;

/// Running estimate of how much live sequences will still grow.
#[derive(Debug)]
pub(crate) struct Growth {
    rho: f64,
    outputs: Vec<usize>,
    next: usize,
    q90: usize,
}

impl Growth {
    pub(crate) fn new() -> Self {
        Self { rho: RHO_MAX, outputs: Vec::with_capacity(WINDOW), next: 0, q90: OUTPUT_GUESS }
    }

    /// A step ended without preemption.
    pub(crate) fn step(&mut self) {
        self.rho = (self.rho - (RHO_MAX - RHO_MIN) / RHO_STEPS).max(RHO_MIN);
    }

    /// A sequence was preempted: the estimate was too low.
    pub(crate) fn preempted(&mut self) {
        self.rho = RHO_MAX;
    }

    /// A sequence ended after generating this many tokens.
    pub(crate) fn observe(&mut self, num_tokens: usize) {
        if self.outputs.len() < WINDOW {
            self.outputs.push(num_tokens);
        } else {
            self.outputs[self.next] = num_tokens;
        }
        self.next = (self.next + 1) % WINDOW;
        let mut sorted = self.outputs.clone();
        sorted.sort_unstable();
        self.q90 = sorted[(sorted.len() * 9 / 10).min(sorted.len() - 1)];
    }

    /// Tokens that a sequence with `tokens_left` is expected to add.
    pub(crate) fn of(&self, tokens_left: usize) -> usize {
        tokens_left.min(GROWTH_CAP).min((self.rho * self.q90 as f64).ceil() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rho_decays_over_600_steps_and_jumps_back() {
        let mut growth = Growth::new();
        assert_eq!(growth.of(10_000), 180); // ceil(0.7 * 256)
        for _ in 0..600 {
            growth.step();
        }
        assert_eq!(growth.of(10_000), 26); // ceil(0.1 * 256)
        growth.step();
        assert_eq!(growth.of(10_000), 26);
        growth.preempted();
        assert_eq!(growth.of(10_000), 180);
        assert_eq!(growth.of(3), 3);
    }

    #[test]
    fn q90_follows_observed_outputs_in_a_window() {
        let mut growth = Growth::new();
        for n in 1..=10 {
            growth.observe(n * 10);
        }
        assert_eq!(growth.of(10_000), 70); // 0.7 * 100
        for _ in 0..WINDOW {
            growth.observe(20);
        }
        assert_eq!(growth.of(10_000), 14);
    }
}
