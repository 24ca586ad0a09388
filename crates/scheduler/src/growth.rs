//! How much live sequences are expected to grow: `min(tokens left, 4096, rho * q90)` tokens each, where q90 is the 0.9 quantile of
//! observed outputs, and rho decays from 0.7 to 0.1 over 600 steps without preemption and jumps back on one.

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
    /// The last outputs, a ring.
    outputs: [usize; WINDOW],
    num_outputs: usize,
    q90: usize,
}

impl Growth {
    pub(crate) fn new() -> Self {
        Self { rho: RHO_MAX, outputs: [0; WINDOW], num_outputs: 0, q90: OUTPUT_GUESS }
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
        self.outputs[self.num_outputs % WINDOW] = num_tokens;
        self.num_outputs += 1;
        let mut sorted = self.outputs;
        let sorted = &mut sorted[..self.num_outputs.min(WINDOW)];
        let rank = (sorted.len() * 9 / 10).min(sorted.len() - 1);
        self.q90 = *sorted.select_nth_unstable(rank).1;
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
