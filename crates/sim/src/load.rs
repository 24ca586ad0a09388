//! What clients ask for, drawn once a run.

use baton_handoff::{RequestId, Time};

use crate::random::Random;
use crate::router::Ask;
use crate::{Faults, Shape};

/// Draws requests one after the other.
pub(crate) struct Clients {
    shape: Shape,
    faults: Faults,
    /// Beginnings that prompts share, so that prefix caches have something to do.
    prefixes: Vec<Vec<u32>>,
}

/// Token ids of prompts: none of them ends a sequence.
fn token(random: &mut Random) -> u32 {
    random.between(3..=40) as u32
}

impl Clients {
    pub(crate) fn new(shape: Shape, faults: Faults, random: &mut Random) -> Self {
        let mut prefix = |_| (0..shape.load.prompt_tokens.1).map(|_| token(random)).collect();
        let prefixes = (0..shape.load.num_prefixes).map(&mut prefix).collect();
        Self { shape, faults, prefixes }
    }

    fn prompt(&self, random: &mut Random) -> Vec<u32> {
        let load = &self.shape.load;
        let (least, most) = (load.prompt_tokens.0.max(1) as u64, load.prompt_tokens.1.max(1) as u64);
        let len = random.between(least..=most.max(least)) as usize;
        let mut prompt = Vec::with_capacity(len);
        if !self.prefixes.is_empty() && random.chance(load.shared_per_mille) {
            let prefix = &self.prefixes[random.index(self.prefixes.len())];
            let shared = if load.prefix_tokens > 0 { load.prefix_tokens } else { random.index(len + 1) };
            prompt.extend_from_slice(&prefix[..shared.min(len)]);
        }
        while prompt.len() < len {
            prompt.push(token(random));
        }
        prompt
    }

    pub(crate) fn ask(&self, random: &mut Random) -> Ask {
        let load = &self.shape.load;
        let prompt = self.prompt(random);
        let (least, most) = (u64::from(load.new_tokens.0.max(1)), u64::from(load.new_tokens.1.max(1)));
        let mut varied = |per_mille| load.varied && random.chance(per_mille);
        let (single, stops, urgent, uncached) = (varied(100), varied(400), varied(300), varied(150));
        let short = random.chance(load.short_per_mille);
        let most = if short { least.max(most / 8) } else { most };
        let max_new_tokens = if single { 1 } else { random.between(least..=most.max(least)) as u32 };
        let several = load.max_sequences > 1 && random.chance(450);
        let num_sequences = if several { random.between(2..=load.max_sequences.into()) } else { 1 };
        let stop_after = |_| (load.varied && random.chance(80)).then(|| random.between(1..=10) as usize);
        let stop_after = (0..num_sequences).map(stop_after).collect();
        Ask {
            request: RequestId(random.id()),
            prompt: prompt.into(),
            max_new_tokens,
            stop_tokens: if stops { vec![1, 2] } else { vec![] },
            seed: random.next(),
            priority: if urgent { random.between(0..=6) as i32 - 3 } else { 0 },
            cache: !uncached,
            stop_after,
            patience: (self.faults == Faults::All && random.chance(100)).then(|| random.millis(20..=60_000)),
        }
    }

    /// How long after its request a client hangs up.
    pub(crate) fn hangs_up(&self, random: &mut Random) -> Option<Time> {
        (self.faults == Faults::All && random.chance(200)).then(|| random.millis(0..=1_500))
    }
}
