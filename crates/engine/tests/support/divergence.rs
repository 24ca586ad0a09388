//! How far one engine's logits are from another's.

/// Logits summed up against a reference's, row by row.
#[derive(Debug, Default)]
pub struct Divergence {
    pub count: usize,
    /// Sum of the Kullback-Leibler divergences.
    pub kl: f64,
    pub largest_difference: f64,
    /// Rows whose best token changed.
    pub flips: usize,
    /// The largest margin between the reference's two best logits where the best token changed.
    pub widest_flip: f64,
}

impl Divergence {
    pub fn add(&mut self, want: &[f32], got: &[f32]) {
        let (sum_want, sum_got) = (log_sum(want), log_sum(got));
        self.count += 1;
        for (&w, &g) in want.iter().zip(got) {
            let (w, g) = (f64::from(w), f64::from(g));
            self.largest_difference = self.largest_difference.max((w - g).abs());
            self.kl += (w - sum_want).exp() * ((w - sum_want) - (g - sum_got));
        }
        let best = |x: &[f32]| (0..x.len()).max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap();
        let first = best(want);
        if best(got) != first {
            let second = want.iter().enumerate().filter(|(i, _)| *i != first).map(|(_, &l)| l);
            let margin = f64::from(want[first] - second.fold(f32::NEG_INFINITY, f32::max));
            self.flips += 1;
            self.widest_flip = self.widest_flip.max(margin);
        }
    }

    pub fn mean_kl(&self) -> f64 {
        self.kl / self.count as f64
    }
}

/// The logarithm of the sum of all exponentials.
pub fn log_sum(logits: &[f32]) -> f64 {
    logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln()
}
