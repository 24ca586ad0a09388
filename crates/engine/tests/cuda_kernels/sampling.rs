//! Sampling on the device against the rules of `src/sampler.rs`, written again with a sort and in f64.

use crate::device::{Device, Launch, device_or_skip, input, number, output};
use crate::support::Random;

/// `Sampling` of `ABI.md`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Sampling {
    seed: u64,
    sequence: u32,
    position: u32,
    temperature: f32,
    top_p: f32,
    min_p: f32,
    top_k: u32,
    row: u32,
    unused: u32,
}

fn plain(seed: u64, row: u32) -> Sampling {
    Sampling {
        seed,
        sequence: 1,
        position: 77,
        temperature: 1.0,
        top_p: 1.0,
        min_p: 0.0,
        top_k: 0,
        row,
        unused: 0,
    }
}

fn run(
    device: &dyn Device,
    logits: &[f32],
    vocab: usize,
    stride: usize,
    samplings: &[Sampling],
) -> Vec<(u32, f32)> {
    let mut tokens = vec![0u32; samplings.len()];
    let mut logprobs = vec![f32::NAN; samplings.len()];
    let mut weights = vec![f32::NAN; samplings.len() * vocab];
    let args = [
        output(&mut tokens),
        output(&mut logprobs),
        output(&mut weights),
        input(logits),
        input(samplings),
        number(vocab),
        number(stride),
    ];
    let launch =
        Launch { kernel: "sample", grid: [samplings.len(), 1, 1], threads: 1024, shared_bytes: 16_384 };
    device.run(&launch, &args);
    tokens.into_iter().zip(logprobs).collect()
}

/// The number that a sampling draws: SplitMix64's finaliser over seed, sequence and position.
fn uniform(s: &Sampling) -> f64 {
    let finalise = |x: u64| {
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let increment = 0x9e37_79b9_7f4a_7c15;
    let key = finalise(s.seed.wrapping_add(increment));
    let counter = u64::from(s.sequence) << 32 | u64::from(s.position);
    (finalise(finalise(key ^ counter).wrapping_add(increment)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Tokens that may be drawn, with their weights, in the order in which they are drawn from.
fn candidates(logits: &[f32], s: &Sampling) -> Vec<(usize, f64)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |l: &f32| (f64::from(*l - largest) / f64::from(s.temperature)).exp();
    let mut all: Vec<(usize, f64)> = logits.iter().map(weight).enumerate().collect();
    if s.top_k > 0 || s.top_p < 1.0 {
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if s.top_k > 0 {
            all.truncate(s.top_k as usize);
        }
        let wanted = f64::from(s.top_p) * all.iter().map(|c| c.1).sum::<f64>();
        let mut sum = 0.0;
        let enough = all.iter().position(|c| {
            sum += c.1;
            sum >= wanted
        });
        all.truncate(enough.map_or(all.len(), |n| n + 1));
    }
    all.retain(|c| c.1 >= f64::from(s.min_p));
    all
}

/// The token, or `None` where the random number or a cut lies so near to a boundary that rounding decides.
fn reference(logits: &[f32], s: &Sampling) -> Option<u32> {
    let slightly = |by: f64| {
        let top_p = if s.top_p < 1.0 { (f64::from(s.top_p) * (1.0 + by)) as f32 } else { 1.0 };
        let s = Sampling { top_p, ..*s };
        let all = candidates(logits, &s);
        let total: f64 = all.iter().map(|c| c.1).sum();
        let mut left = (uniform(&s) * (1.0 + by)) * total;
        let drawn = all.iter().find(|c| {
            left -= c.1;
            left < 0.0
        });
        drawn.or(all.last()).map(|c| c.0 as u32)
    };
    let tokens = [-1e-5, 0.0, 1e-5].map(slightly);
    (tokens[0] == tokens[1] && tokens[1] == tokens[2]).then_some(tokens[1]).flatten()
}

fn logits(seed: u64, n: usize) -> Vec<f32> {
    let mut random = Random(seed);
    // A sum of some is bell-shaped: a few tokens stand out.
    (0..n).map(|_| (0..6).map(|_| random.signed()).sum::<f32>() * 3.0).collect()
}

#[test]
fn drawn_tokens_follow_the_rules_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for vocab in [288usize, 1030, 5000] {
        let stride = vocab + 16;
        let mut rows = logits(vocab as u64, 2 * stride);
        // Equals: the rounding to quarters makes many; and a second row of only two values.
        rows[stride..].iter_mut().for_each(|l| *l = (*l * 4.0).round() / 4.0);
        let mut samplings = Vec::new();
        for seed in 0..6 {
            for (temperature, top_k, top_p, min_p) in [
                (1.0, 0, 1.0, 0.0),
                (0.7, 0, 1.0, 0.05),
                (1.0, 40, 1.0, 0.0),
                (1.3, 0, 0.9, 0.0),
                (0.8, 50, 0.95, 0.02),
                (1.0, 1, 1.0, 0.0),
                (1.0, 0, 0.01, 0.0),
                (2.0, 100_000, 0.5, 0.3),
                // Nearly as many as the weights that are looked at for it.
                (10.0, 1000, 1.0, 0.0),
            ] {
                let row = seed as u32 % 2;
                samplings.push(Sampling { temperature, top_k, top_p, min_p, ..plain(seed, row) });
            }
        }
        let got = run(device, &rows, vocab, stride, &samplings);
        let mut decided = 0;
        for (s, (token, logprob)) in samplings.iter().zip(got) {
            let row = &rows[s.row as usize * stride..][..vocab];
            if let Some(want) = reference(row, s) {
                assert_eq!(token, want, "{s:?}, vocabulary of {vocab}");
                decided += 1;
            }
            let largest = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let sum: f64 = row.iter().map(|&l| (f64::from(l) - largest).exp()).sum();
            let want = f64::from(row[token as usize]) - largest - sum.ln();
            assert!((f64::from(logprob) - want).abs() < 1e-5, "{s:?}: {logprob}, not {want}");
        }
        assert!(decided + 3 > samplings.len(), "only {decided} of {} are clear", samplings.len());
    }
}

#[test]
fn greedy_takes_the_lowest_of_equals_and_refuses_what_is_not_finite_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    let vocab = 300;
    let greedy = |row| Sampling { temperature: 0.0, ..plain(1, row) };
    let mut rows = vec![-1.0f32; 5 * vocab];
    (rows[40], rows[7], rows[299]) = (2.5, 2.5, 2.5);
    // Both zeros are one number.
    (rows[vocab + 3], rows[vocab + 2]) = (0.0, -0.0);
    (rows[2 * vocab + 9], rows[3 * vocab + 299], rows[4 * vocab]) =
        (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let samplings = [0, 1, 2, 3, 4].map(greedy);
    let tokens: Vec<u32> =
        run(device, &rows, vocab, vocab, &samplings).into_iter().map(|(token, _)| token).collect();
    assert_eq!(tokens[..4], [7, 2, u32::MAX, u32::MAX]);
    assert_eq!(tokens[4], u32::MAX);
}

#[test]
fn every_token_is_drawn_as_often_as_its_probability_says() {
    let Some(device) = device_or_skip() else { return };
    let (vocab, draws) = (4usize, 200u32);
    let rows: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln()).collect();
    let samplings: Vec<Sampling> = (0..draws).map(|position| Sampling { position, ..plain(3, 0) }).collect();
    let mut counts = [0f64; 4];
    for (token, _) in run(device, &rows, vocab, vocab, &samplings) {
        counts[token as usize] += 1.0;
    }
    for (count, p) in counts.iter().zip([0.5, 0.25, 0.125, 0.125]) {
        let sigma = (f64::from(draws) * p * (1.0 - p)).sqrt();
        assert!((count - f64::from(draws) * p).abs() < 4.0 * sigma, "{counts:?}");
    }
}

#[test]
fn no_schedule_changes_what_is_drawn() {
    let Some(device) = device_or_skip() else { return };
    let rows = logits(9, 700);
    let samplings: Vec<Sampling> = [(40, 0.9), (0, 0.8), (0, 1.0), (7, 1.0)]
        .map(|(top_k, top_p)| Sampling { top_k, top_p, ..plain(5, 0) })
        .to_vec();
    let want = run(device, &rows, 700, 700, &samplings);
    for schedule in device.schedules() {
        device.set_schedule(schedule);
        let got = run(device, &rows, 700, 700, &samplings);
        device.set_schedule(0);
        assert_eq!(got, want, "schedule {schedule}");
    }
}
