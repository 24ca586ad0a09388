//! A made trace in the form of Mooncake's: conversations over shared beginnings, block by block.
//!
//! A request begins a conversation or goes on with one of the last hundred. A conversation begins with one of a few shared beginnings
//! (system prompts), of which the n-th is 1/n times as frequent as the first (Zipf's law). A request that goes on has the blocks of the one
//! before, the answer that it got, and what is new. What is new, and answers, are log-normal: many short ones, few long ones.

use std::collections::HashSet;

use super::random::Random;

/// Tokens that one name of a block stands for.
pub const TRACE_BLOCK_TOKENS: u32 = 512;
/// Conversations that can go on.
const OPEN_CONVERSATIONS: usize = 100;
/// Standard deviation of the logarithm of lengths.
const SIGMA: f64 = 0.8;
/// The sequence of arrival times; others stand apart from those of requests.
const TIMES: u64 = 1;
const REST: u64 = 2;

/// What a made trace is to be like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceShape {
    /// Requests.
    pub num_requests: u32,
    /// Requests a second, a Poisson process; above 0.
    pub rate: f64,
    /// Mean tokens that are new in a request: its own, beside what it shares.
    pub new_tokens: u32,
    /// Mean tokens of an answer.
    pub output_tokens: u32,
    /// Shared beginnings; 0: none.
    pub num_prefixes: u32,
    /// Tokens of each, in whole blocks.
    pub prefix_tokens: u32,
    /// How many requests in a hundred go on with a conversation.
    pub turns_percent: u32,
    /// Tokens of a prompt at most; a conversation that would be longer begins anew.
    pub max_tokens: u32,
}

/// One request, as a line of a trace file says it.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceLine {
    /// Milliseconds from the first request on.
    pub timestamp: f64,
    /// Tokens of the prompt.
    pub input_length: u32,
    /// Tokens of the answer.
    pub output_length: u32,
    /// Names of the prompt's blocks; the last one may be partly filled.
    pub hash_ids: Vec<u64>,
}

/// A conversation so far: its full blocks, and tokens of prompt and answer together.
#[derive(Debug, Clone)]
struct Conversation {
    ids: Vec<u64>,
    tokens: u32,
}

struct Maker {
    shape: TraceShape,
    random: Random,
    /// Names of the blocks of each shared beginning.
    prefixes: Vec<Vec<u64>>,
    /// Sums of 1/n: where a draw falls among the beginnings.
    weights: Vec<f64>,
    open: Vec<Conversation>,
    next_id: u64,
}

/// Makes one: a function of its arguments.
pub fn made_trace(seed: u64, shape: TraceShape) -> Vec<TraceLine> {
    let mut times = Random::new(seed, TIMES);
    let mut maker = Maker::new(shape, Random::new(seed, REST));
    let mut at_ms = 0.0;
    (0..shape.num_requests)
        .map(|_| {
            let line = maker.line(at_ms);
            at_ms += times.exponential(shape.rate) * 1e3;
            line
        })
        .collect()
}

impl Maker {
    fn new(shape: TraceShape, random: Random) -> Self {
        let num_blocks = u64::from(shape.prefix_tokens / TRACE_BLOCK_TOKENS);
        let ids = |nth: u64| (nth * num_blocks..(nth + 1) * num_blocks).collect();
        let mut sum = 0.0;
        let weights = (1..=shape.num_prefixes).map(|nth| {
            sum += 1.0 / f64::from(nth);
            sum
        });
        let weights = weights.collect();
        let prefixes = (0..u64::from(shape.num_prefixes)).map(ids).collect();
        let next_id = u64::from(shape.num_prefixes) * num_blocks;
        Self { shape, random, prefixes, weights, open: Vec::new(), next_id }
    }

    fn length(&mut self, mean: u32) -> u32 {
        let drawn = self.random.log_normal(f64::from(mean), SIGMA);
        (drawn.round() as u32).clamp(1, self.shape.max_tokens)
    }

    fn line(&mut self, timestamp: f64) -> TraceLine {
        let (fresh, output) = (self.length(self.shape.new_tokens), self.length(self.shape.output_tokens));
        let goes_on = self.random.between(1, 100) <= self.shape.turns_percent;
        let before = if goes_on { self.conversation(fresh) } else { None };
        let before = before.unwrap_or_else(|| self.beginning());
        let input_length = before.tokens.saturating_add(fresh).clamp(1, self.shape.max_tokens);
        let mut ids = before.ids;
        ids.truncate(input_length.div_ceil(TRACE_BLOCK_TOKENS) as usize);
        while ids.len() < input_length.div_ceil(TRACE_BLOCK_TOKENS) as usize {
            ids.push(self.next_id);
            self.next_id += 1;
        }
        self.keep(&ids, input_length, output);
        TraceLine { timestamp, input_length, output_length: output, hash_ids: ids }
    }

    /// One of the open conversations, taken out; `None` when there is none with room for so many new tokens.
    fn conversation(&mut self, fresh: u32) -> Option<Conversation> {
        let last = u32::try_from(self.open.len()).ok()?.checked_sub(1)?;
        let nth = self.random.between(0, last) as usize;
        let taken = self.open.swap_remove(nth);
        (taken.tokens.saturating_add(fresh) <= self.shape.max_tokens).then_some(taken)
    }

    fn beginning(&mut self) -> Conversation {
        let drawn = self.random.unit() * self.weights.last().copied().unwrap_or(0.0);
        let nth = self.weights.partition_point(|sum| *sum <= drawn);
        let ids = self.prefixes.get(nth).cloned().unwrap_or_default();
        let tokens = ids.len() as u32 * TRACE_BLOCK_TOKENS;
        Conversation { ids, tokens }
    }

    /// The next turn has the full blocks of this one; what only partly fills a block gets another name there.
    fn keep(&mut self, ids: &[u64], input: u32, output: u32) {
        let full = (input / TRACE_BLOCK_TOKENS) as usize;
        let next = Conversation { ids: ids[..full].to_vec(), tokens: input.saturating_add(output) };
        if self.open.len() == OPEN_CONVERSATIONS {
            self.open.remove(0);
        }
        self.open.push(next);
    }
}

/// Prompt tokens of all lines, and those of them in leading full blocks that an earlier line had: what a prefix cache without bound would find.
pub fn reused_tokens(lines: &[TraceLine]) -> (u64, u64) {
    let mut seen: HashSet<u64> = HashSet::new();
    let (mut all, mut reused) = (0, 0);
    for line in lines {
        all += u64::from(line.input_length);
        let full = (line.input_length / TRACE_BLOCK_TOKENS) as usize;
        let known = line.hash_ids.iter().take(full).take_while(|id| seen.contains(*id)).count();
        reused += known as u64 * u64::from(TRACE_BLOCK_TOKENS);
        seen.extend(line.hash_ids.iter().take(full));
    }
    (all, reused)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: TraceShape = TraceShape {
        num_requests: 4_000,
        rate: 20.0,
        new_tokens: 1_200,
        output_tokens: 200,
        num_prefixes: 8,
        prefix_tokens: 2_048,
        turns_percent: 50,
        max_tokens: 16_384,
    };

    #[test]
    fn lines_are_what_a_trace_file_may_say_and_follow_from_the_seed() {
        let lines = made_trace(1, SHAPE);
        assert_eq!(lines, made_trace(1, SHAPE));
        assert_ne!(lines, made_trace(2, SHAPE));
        assert_eq!((lines.len(), lines[0].timestamp), (4_000, 0.0));
        for (nth, line) in lines.iter().enumerate() {
            assert!((1..=16_384).contains(&line.input_length) && line.output_length >= 1, "{nth}");
            assert_eq!(line.hash_ids.len(), line.input_length.div_ceil(512) as usize, "{nth}");
        }
        assert!(lines.windows(2).all(|pair| pair[0].timestamp <= pair[1].timestamp));
        let rate = 4_000.0 / lines[3_999].timestamp * 1e3;
        assert!((rate - 20.0).abs() < 1.5, "{rate}");
        let mean = lines.iter().map(|line| f64::from(line.output_length)).sum::<f64>() / 4_000.0;
        assert!((mean - 200.0).abs() < 15.0, "{mean}");
    }

    #[test]
    fn beginnings_and_turns_are_shared_and_nothing_else_is() {
        let share = |shape| {
            let (all, reused) = reused_tokens(&made_trace(1, shape));
            reused as f64 / all as f64
        };
        let (both, turns) = (share(SHAPE), share(TraceShape { num_prefixes: 0, ..SHAPE }));
        assert!(both > 0.5 && both < 0.9, "{both}");
        assert!(turns > 0.2 && turns < both, "{turns}");
        let none = TraceShape { num_prefixes: 0, turns_percent: 0, ..SHAPE };
        assert_eq!(reused_tokens(&made_trace(1, none)).1, 0);
        // The first of eight beginnings has a share of 1 / (1 + 1/2 + ... + 1/8) = 0.37.
        let lines = made_trace(1, TraceShape { turns_percent: 0, ..SHAPE });
        let first = lines.iter().filter(|line| line.hash_ids[0] == 0).count() as f64 / 4_000.0;
        assert!((first - 0.37).abs() < 0.03, "{first}");
    }
}
