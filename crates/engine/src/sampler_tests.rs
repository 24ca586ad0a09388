//! Sampling against its definition.

use proptest::prelude::*;

use super::*;
use crate::kernels::Isa;

fn kernels() -> &'static Kernels {
    Kernels::of(Isa::available()[0]).unwrap()
}

fn params(temperature: f32) -> SamplingParams {
    SamplingParams { temperature, ..SamplingParams::GREEDY }
}

fn sampling(params: SamplingParams, position: u32) -> RowSampling {
    RowSampling { params, sequence: 0, position }
}

fn drawn(logits: &[f32], sampling: RowSampling) -> Result<Drawn, NotFinite> {
    let mut padded = logits.to_vec();
    padded.resize(logits.len().next_multiple_of(LANES), 1e30);
    // SAFETY: the kernels are available, memory goes on to the next multiple of 16.
    unsafe { draw(kernels(), &padded[..logits.len()], &sampling, &mut SamplerScratch::new(logits.len())) }
}

/// Tokens that can be drawn at all, by drawing often.
fn support(logits: &[f32], params: SamplingParams) -> Vec<u32> {
    let mut seen: Vec<u32> = (0..4000).map(|n| drawn(logits, sampling(params, n)).unwrap().token).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_id_among_equals() {
    let mut logits = vec![0.0; 50];
    (logits[20], logits[33], logits[49]) = (2.5, 2.5, 2.5);
    assert_eq!(drawn(&logits, sampling(SamplingParams::GREEDY, 1)).unwrap().token, 20);
}

#[test]
fn logprob_is_that_of_the_raw_logits() {
    let logits = [1.0f32, 3.0, -2.0, 0.5];
    let sum: f32 = logits.iter().map(|l| l.exp()).sum();
    for temperature in [0.0, 0.5, 2.0] {
        for position in 0..20 {
            let p = SamplingParams { top_k: 3, ..params(temperature) };
            let got = drawn(&logits, sampling(p, position)).unwrap();
            assert!((got.logprob - (logits[got.token as usize] - sum.ln())).abs() < 1e-5);
        }
    }
}

#[test]
fn what_is_not_finite_is_refused() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = vec![0.0; 40];
        logits[37] = bad;
        for p in [SamplingParams::GREEDY, params(1.0)] {
            assert_eq!(drawn(&logits, sampling(p, 0)), Err(NotFinite));
        }
    }
}

#[test]
fn frequencies_are_the_softmax() {
    let logits = [0.0f32, 1.0, 2.0, -1.0, 0.5];
    for temperature in [0.7, 1.0, 1.5] {
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(l / temperature).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut counts = [0.0; 5];
        const DRAWS: u32 = 40_000;
        for position in 0..DRAWS {
            counts[drawn(&logits, sampling(params(temperature), position)).unwrap().token as usize] += 1.0;
        }
        for (count, weight) in counts.iter().zip(&weights) {
            let (got, want) = (count / f64::from(DRAWS), weight / sum);
            // Five standard deviations.
            let bound = 5.0 * (want * (1.0 - want) / f64::from(DRAWS)).sqrt();
            assert!((got - want).abs() < bound, "{got}, want {want}");
        }
    }
}

#[test]
fn the_random_number_depends_on_seed_sequence_and_position_alone() {
    let at = |seed, sequence, position| {
        uniform(&RowSampling { params: SamplingParams { seed, ..params(1.0) }, sequence, position })
    };
    let mut seen = Vec::new();
    for seed in [0, 1, 1 << 32, u64::MAX] {
        for sequence in [0, 1, 1 << 20] {
            for position in [0, 1, 2, 1 << 20] {
                let u = at(seed, sequence, position);
                assert!((0.0..1.0).contains(&u));
                assert_eq!(u, at(seed, sequence, position));
                seen.push(u.to_bits());
            }
        }
    }
    let count = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), count, "different counters, different numbers");
    let mean = (0..10_000).map(|p| at(7, 0, p)).sum::<f64>() / 10_000.0;
    assert!((mean - 0.5).abs() < 0.015, "{mean}");
    // Sampled text must not change from one release to the next.
    assert_eq!(at(42, 3, 1000), 0.3357194664407277);
}

#[test]
fn parameters_out_of_bounds_are_named() {
    for (bad, name) in [
        (params(f32::NAN), "temperature"),
        (params(-1.0), "temperature"),
        (SamplingParams { top_p: 0.0, ..params(1.0) }, "top_p"),
        (SamplingParams { top_p: 1.1, ..params(1.0) }, "top_p"),
        (SamplingParams { min_p: 1.0, ..params(1.0) }, "min_p"),
        (SamplingParams { min_p: -0.1, ..params(1.0) }, "min_p"),
    ] {
        assert!(check(&bad).unwrap_err().starts_with(name));
    }
    assert_eq!(check(&params(2.0)), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever the logits: exactly the tokens of the definition can be drawn.
    #[test]
    fn truncation_keeps_exactly_the_set_of_the_definition(
        steps in prop::collection::vec(0u32..12, 1..24),
        top_k in 0u32..10,
        top_p in prop_oneof![Just(1.0f32), 0.05f32..0.99],
        min_p in prop_oneof![Just(0.0f32), 0.02f32..0.6],
    ) {
        // Spaced so that no set's edge is a matter of rounding, and every kept token is drawn in 4000 tries.
        let logits: Vec<f32> = steps.iter().map(|&s| s as f32 * 0.31).collect();
        let p = SamplingParams { top_k, top_p, min_p, ..params(1.0) };
        let mut ranked: Vec<(f64, u32)> =
            logits.iter().enumerate().map(|(i, &l)| (f64::from(l).exp(), i as u32)).collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if top_k > 0 {
            ranked.truncate(top_k as usize);
        }
        let total: f64 = ranked.iter().map(|r| r.0).sum();
        let mut kept = Vec::new();
        let mut weight = 0.0;
        for &(w, token) in &ranked {
            // Too close to the edge to decide in f32: not what this test is about.
            prop_assume!((weight / total - f64::from(top_p)).abs() > 1e-5 || top_p >= 1.0);
            if weight < f64::from(top_p) * total {
                kept.push((w, token));
            }
            weight += w;
        }
        let best = kept[0].0;
        prop_assume!(kept.iter().all(|&(w, _)| (w / best - f64::from(min_p)).abs() > 1e-4));
        let mut want: Vec<u32> =
            kept.iter().filter(|&&(w, _)| w >= f64::from(min_p) * best).map(|&(_, token)| token).collect();
        want.sort_unstable();
        let got = support(&logits, p);
        prop_assert!(got.iter().all(|t| want.contains(t)), "drew {got:?}, allowed {want:?}");
        let share = kept.iter().map(|k| k.0).sum::<f64>();
        let rare = kept.iter().filter(|k| want.contains(&k.1) && k.0 / share < 0.004).count();
        prop_assert!(got.len() + rare >= want.len(), "drew {got:?}, want {want:?}");
    }

    /// A large vocabulary, where tokens are dropped before sorting.
    #[test]
    fn top_p_keeps_the_minimal_set(seed in 0u64..1000, top_p in 0.01f32..0.999) {
        let noise = |i: u64| (super::finalise(seed << 20 | i) >> 40) as f32 / (1 << 24) as f32;
        let logits: Vec<f32> = (0..3000).map(|i| 12.0 * noise(i)).collect();
        let weights: Vec<f32> = {
            let largest = logits.iter().copied().fold(0.0, f32::max);
            logits.iter().map(|l| (l - largest).exp()).collect()
        };
        let sum: f64 = weights.iter().map(|&w| f64::from(w)).sum();
        let p = SamplingParams { top_p, ..params(1.0) };
        let mut candidates = Vec::new();
        choose(&p, &weights, sum, 0.5, &mut candidates);
        let kept: f64 = candidates.iter().map(|c| f64::from(c.weight)).sum();
        let last = f64::from(candidates.last().unwrap().weight);
        let wanted = f64::from(top_p) * sum;
        prop_assert!(kept >= wanted * (1.0 - 1e-9), "{kept} of {wanted}");
        prop_assert!(kept - last < wanted, "one token fewer would do");
        let dropped = weights.iter().filter(|&&w| f64::from(w) > last).count();
        prop_assert_eq!(dropped, candidates.iter().filter(|c| f64::from(c.weight) > last).count());
    }
}
