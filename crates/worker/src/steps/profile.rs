//! What turns of the loop took lately, by kind of step: what a simulation of this worker needs.
//!
//! The scheduler plans with one cost for all steps ([`super::cost_fit`]), which follows changes quickly and forgets what is rare. Here rare steps are kept as
//! long as others of their kind: a colocated worker that takes a prompt in one piece has one such step in hundreds. And each kind has a cost of its
//! own, since what a token costs that is one of many differs from what it costs in a step that waits for memory.

use std::sync::{Mutex, PoisonError, TryLockError};

use baton_scheduler::{StepCost, StepPlan};

use baton_telemetry::metrics::STEP_SHARES;

use super::cost_fit::{Features, LeastSquares, expected, features};

/// Steps of a kind that are kept: a minute of the shortest.
const KEPT: usize = 16_384;
/// From so many prompt tokens on a step's time is mostly theirs.
const MANY_TOKENS: usize = 64;

/// Kinds of steps, by the prompt tokens in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// None.
    Decode,
    /// Fewer than 64: decoding still decides how long it takes.
    Few,
    /// More.
    Many,
}

impl StepKind {
    /// Every kind; each begins where the one before it ends.
    pub const ALL: [Self; 3] = [Self::Decode, Self::Few, Self::Many];

    /// Of a step with so many tokens in rows of more than one token.
    pub const fn of(num_prompt_tokens: usize) -> Self {
        match num_prompt_tokens {
            0 => Self::Decode,
            tokens if tokens < MANY_TOKENS => Self::Few,
            _ => Self::Many,
        }
    }

    /// The fewest prompt tokens of such a step.
    pub const fn from_prompt_tokens(self) -> usize {
        match self {
            Self::Decode => 0,
            Self::Few => 1,
            Self::Many => MANY_TOKENS,
        }
    }

    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Few => "few",
            Self::Many => "many",
        }
    }
}

/// What steps of a kind took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KindProfile {
    /// Which.
    pub kind: StepKind,
    /// How many it is learnt from.
    pub num_steps: usize,
    /// What one is expected to take, from one boundary to the next: the cost with the least relative squares.
    pub cost: StepCost,
    /// For each of [`STEP_SHARES`]: how many times that these steps took at most.
    pub ratios: [f64; STEP_SHARES.len()],
}

/// A step: its features and its seconds.
#[derive(Clone, Copy, Debug)]
struct Seen {
    features: Features,
    seconds: f64,
}

/// The last steps of a kind, a ring.
#[derive(Debug)]
struct Ring {
    seen: Vec<Seen>,
    next: usize,
}

/// The last steps of each kind. The loop writes, and never waits for a reader.
#[derive(Debug)]
pub(super) struct StepProfile(Mutex<[Ring; 3]>);

impl Default for StepProfile {
    fn default() -> Self {
        // At once, since a step allocates nothing.
        Self(Mutex::new(StepKind::ALL.map(|_| Ring { seen: Vec::with_capacity(KEPT), next: 0 })))
    }
}

/// What the loop notes of a plan before it is applied, and gone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    kind: StepKind,
    features: Features,
}

impl Planned {
    pub(super) fn new(plan: &StepPlan) -> Self {
        let prompts = plan.rows.iter().map(|row| row.tokens.len()).filter(|tokens| *tokens > 1);
        Self { kind: StepKind::of(prompts.sum()), features: features(plan) }
    }
}

impl StepProfile {
    /// A turn of the loop with this step took so long. Nothing is noted while somebody reads.
    pub(super) fn observe(&self, planned: Planned, seconds: f64) {
        let mut rings = match self.0.try_lock() {
            Ok(rings) => rings,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let ring = &mut rings[planned.kind as usize];
        let seen = Seen { features: planned.features, seconds };
        if ring.seen.len() < KEPT {
            ring.seen.push(seen);
        } else {
            ring.seen[ring.next] = seen;
        }
        ring.next = (ring.next + 1) % KEPT;
    }

    /// Of each kind of which any was seen.
    pub(super) fn read(&self) -> Vec<KindProfile> {
        let seen = {
            let rings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            StepKind::ALL.map(|kind| rings[kind as usize].seen.clone())
        };
        StepKind::ALL.into_iter().zip(&seen).filter_map(|(kind, seen)| profile(kind, seen)).collect()
    }
}

fn profile(kind: StepKind, seen: &[Seen]) -> Option<KindProfile> {
    if seen.is_empty() {
        return None;
    }
    let mut squares = LeastSquares::default();
    for Seen { features, seconds } in seen {
        // Each by its own length, so that short steps count as much as long ones.
        let weight = 1.0 / (seconds * seconds).max(f64::MIN_POSITIVE);
        squares.add(features, *seconds, weight);
    }
    let cost = squares.fit();
    let ratio = |seen: &Seen| seen.seconds / expected(&cost, &seen.features).max(f64::MIN_POSITIVE);
    let mut ratios: Vec<f64> = seen.iter().map(ratio).collect();
    ratios.sort_unstable_by(f64::total_cmp);
    // Straight lines between the sorted ones, so that few steps have a spread too.
    let at = |share: f64| {
        let place = share * (ratios.len() - 1) as f64;
        let (below, above) = (place.floor() as usize, place.ceil() as usize);
        ratios[below] + (ratios[above] - ratios[below]) * place.fract()
    };
    Some(KindProfile { kind, num_steps: seen.len(), cost, ratios: STEP_SHARES.map(|(share, _)| at(share)) })
}

#[cfg(test)]
mod tests {
    use baton_scheduler::SequenceId;

    use super::*;

    /// A token of a step that decodes costs ten times what one of many does.
    const DECODE: StepCost = StepCost { fixed_s: 2e-3, per_token_s: 1e-3, per_context_token_s: 1e-6 };
    const MANY: StepCost = StepCost { fixed_s: 5e-3, per_token_s: 1e-4, per_context_token_s: 1e-8 };

    fn planned(rows: &[(usize, usize)]) -> Planned {
        let mut plan = StepPlan::default();
        for (id, &(position, num_tokens)) in rows.iter().enumerate() {
            plan.push(SequenceId(id as u64), position, &vec![1; num_tokens], &[0], &[]);
        }
        Planned::new(&plan)
    }

    fn of(kinds: &[KindProfile], kind: StepKind) -> &KindProfile {
        kinds.iter().find(|profile| profile.kind == kind).unwrap()
    }

    #[test]
    fn a_rare_long_step_is_remembered_among_thousands_of_short_ones() {
        let profile = StepProfile::default();
        let decode = |n: usize| planned(&[(100 + n % 400, 1), (n % 300, 1), (n % 7, 1)]);
        let long = planned(&[(0, 2_048), (300, 1)]);
        for n in 0..2 * KEPT {
            let step = decode(n);
            // One in ten takes half as long again.
            let noise = if n % 10 == 3 { 1.5 } else { 1.0 };
            profile.observe(step, noise * expected(&DECODE, &step.features));
            if n % 3_000 == 500 {
                profile.observe(long, expected(&MANY, &long.features));
            }
        }
        let kinds = profile.read();
        assert_eq!(kinds.len(), 2, "{kinds:?}");
        let many = of(&kinds, StepKind::Many);
        assert_eq!((many.num_steps, of(&kinds, StepKind::Decode).num_steps), (11, KEPT));
        let off = expected(&many.cost, &long.features) / expected(&MANY, &long.features) - 1.0;
        assert!(off.abs() < 0.01, "{off}");
        // Least relative squares lie between the two: what matters is the product with the ratios.
        let ratios = of(&kinds, StepKind::Decode).ratios;
        let (median, p95) = (ratios[5], ratios[8]);
        assert!((p95 / median / 1.5 - 1.0).abs() < 0.02, "{ratios:?}");
        let step = decode(17);
        let usual = expected(&of(&kinds, StepKind::Decode).cost, &step.features) * median;
        assert!((usual / expected(&DECODE, &step.features) - 1.0).abs() < 0.02, "{usual}");
    }

    #[test]
    fn kinds_go_by_prompt_tokens_and_a_row_of_one_token_is_none() {
        let kind = |rows| planned(rows).kind;
        assert_eq!(kind(&[(9, 1), (0, 1)]), StepKind::Decode);
        assert_eq!(kind(&[(9, 1), (0, 2)]), StepKind::Few);
        assert_eq!(kind(&[(0, 32), (0, 31)]), StepKind::Few);
        assert_eq!(kind(&[(0, 32), (0, 32)]), StepKind::Many);
        for kind in StepKind::ALL {
            assert_eq!(StepKind::of(kind.from_prompt_tokens()), kind);
            assert_eq!(StepKind::ALL[kind as usize], kind);
        }
    }

    #[test]
    fn nothing_is_said_before_a_step_and_of_one_that_it_took_what_it_took() {
        let profile = StepProfile::default();
        assert_eq!(profile.read(), []);
        let step = planned(&[(0, 1)]);
        profile.observe(step, 0.01);
        let kinds = profile.read();
        assert_eq!(kinds.len(), 1);
        assert!(kinds[0].ratios.iter().all(|ratio| (ratio - 1.0).abs() < 0.01), "{kinds:?}");
    }
}
