//! What is sent when: streams in the background, and requests that arrive beside them. A plain value, so that several clusters
//! can be loaded alike.

use std::time::Duration;

use super::options::Lengths;
use super::random::Random;
use super::request::{Ask, Asks, FIRST_ID};
use crate::exit::Failure;

/// Tokens of a background stream's own prompt: one block.
const STREAM_PROMPT_TOKENS: u32 = 16;
/// Random sequences: background prompts count from 0, arriving prompts from here.
const FIRST_ARRIVAL: u64 = 1 << 32;
/// The sequence that arrival times are drawn from.
const TIMES: u64 = u64::MAX;
/// Arrivals of one run.
const MAX_ARRIVALS: usize = 1_000_000;
/// Set apart from the sequences of unique prompts, so that a shared block never equals one of theirs.
const SHARED_BLOCKS: u64 = 0x7368_6172_6564_0000;

/// Everything that one run sends.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Workload {
    /// Seed of all prompts.
    pub(super) seed: u64,
    /// Prompts are made of token ids below this.
    pub(super) vocab: u32,
    /// Streams that decode all the time.
    pub(super) streams: Streams,
    /// Time that the streams run alone first.
    pub(super) quiet: Duration,
    /// Requests that arrive, by time.
    pub(super) arrivals: Vec<Arrival>,
}

/// The background: none, or so many streams, each started again when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Streams {
    /// How many.
    pub(super) num: u32,
    /// Tokens of each.
    pub(super) output_tokens: u32,
}

/// One request that arrives.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Arrival {
    /// When, from the end of the quiet time on.
    pub(super) at: Duration,
    /// What it asks about.
    pub(super) prompt: Prompt,
    /// Tokens it asks for.
    pub(super) output_tokens: u32,
}

/// A prompt, told shortly: its tokens are made when it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Prompt {
    /// Unlike any other from its first block on.
    Unique {
        /// Which one.
        nth: u64,
        /// Its length.
        tokens: u32,
    },
    /// Blocks by name: the same name stands for the same tokens, so that prompts share what their traces say they share.
    Blocks {
        /// Names of the blocks, in order.
        ids: Vec<u64>,
        /// Tokens of a whole block; the last one may be shorter.
        block: u32,
        /// Tokens of all.
        tokens: u32,
    },
}

impl Prompt {
    /// Its length in tokens.
    pub(super) fn num_tokens(&self) -> u32 {
        match self {
            Self::Unique { tokens, .. } | Self::Blocks { tokens, .. } => *tokens,
        }
    }
}

impl Workload {
    /// The request of an arrival.
    pub(super) fn ask(&self, arrival: &Arrival) -> Ask {
        let prompt = match &arrival.prompt {
            Prompt::Unique { nth, tokens } => self.asks(*tokens, 1).nth(FIRST_ARRIVAL + nth).prompt,
            Prompt::Blocks { ids, block, tokens } => {
                let blocks = ids.iter().flat_map(|id| {
                    let mut random = Random::new(self.seed ^ SHARED_BLOCKS, *id);
                    (0..*block).map(move |_| random.between(FIRST_ID, self.vocab - 1))
                });
                blocks.take(*tokens as usize).collect()
            }
        };
        Ask { prompt, output_tokens: arrival.output_tokens }
    }

    /// The request of a background stream's `turn`.
    pub(super) fn stream(&self, nth: u32, turn: u64) -> Ask {
        let sequence = u64::from(nth) + turn * u64::from(self.streams.num);
        self.asks(STREAM_PROMPT_TOKENS, self.streams.output_tokens).nth(sequence)
    }

    fn asks(&self, prompt: u32, output: u32) -> Asks {
        let exactly = |tokens| Lengths { low: tokens, high: tokens };
        Asks {
            seed: self.seed,
            vocab: self.vocab,
            prompt_tokens: exactly(prompt),
            output_tokens: exactly(output),
        }
    }

    /// The longest prompt, in tokens.
    pub(super) fn longest_prompt(&self) -> u32 {
        self.arrivals.iter().map(|arrival| arrival.prompt.num_tokens()).max().unwrap_or(STREAM_PROMPT_TOKENS)
    }
}

/// How unique prompts arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pace {
    /// Arrivals a second of a Poisson process, or else one after each of these.
    pub(super) gaps: Gaps,
    /// Go on for this long...
    pub(super) duration: Duration,
    /// ...and until so many have come.
    pub(super) at_least: u32,
}

/// Time between two arrivals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Gaps {
    /// A Poisson process of this rate, a second.
    Poisson(f64),
    /// Always the same.
    Every(Duration),
}

/// What every one of the unique prompts is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Tokens of the prompt.
    pub(super) prompt_tokens: u32,
    /// Tokens asked for.
    pub(super) output_tokens: u32,
}

/// Unique prompts that arrive at that pace; the first at once.
///
/// # Errors
/// [`Failure::Usage`] for more of them than [`MAX_ARRIVALS`].
pub(super) fn unique_arrivals(seed: u64, pace: Pace, shape: Shape) -> Result<Vec<Arrival>, Failure> {
    let mut random = Random::new(seed, TIMES);
    let (mut arrivals, mut at) = (Vec::new(), Duration::ZERO);
    while at < pace.duration || arrivals.len() < pace.at_least as usize {
        if arrivals.len() == MAX_ARRIVALS {
            let why =
                "a shorter --duration, fewer --arrivals, a lower --arrival-rate or a longer --arrival-every";
            return Err(Failure::Usage(format!("more than {MAX_ARRIVALS} arrivals: choose {why}")));
        }
        let prompt = Prompt::Unique { nth: arrivals.len() as u64, tokens: shape.prompt_tokens };
        arrivals.push(Arrival { at, prompt, output_tokens: shape.output_tokens });
        at += match pace.gaps {
            Gaps::Poisson(rate) => Duration::from_secs_f64(random.exponential(rate)),
            Gaps::Every(gap) => gap,
        };
    }
    Ok(arrivals)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { prompt_tokens: 64, output_tokens: 8 };

    fn workload(arrivals: Vec<Arrival>) -> Workload {
        let streams = Streams { num: 8, output_tokens: 500 };
        Workload { seed: 1, vocab: 256, streams, quiet: Duration::ZERO, arrivals }
    }

    #[test]
    fn arrivals_fill_the_duration_and_are_never_too_few() {
        let pace = Pace { gaps: Gaps::Poisson(2.0), duration: Duration::from_secs(100), at_least: 8 };
        let arrivals = unique_arrivals(1, pace, SHAPE).unwrap();
        assert!((150..250).contains(&arrivals.len()), "{}", arrivals.len());
        assert!(arrivals.iter().all(|arrival| arrival.at < pace.duration));
        assert_eq!(arrivals, unique_arrivals(1, pace, SHAPE).unwrap());
        let rare = Pace { gaps: Gaps::Poisson(0.001), duration: Duration::from_secs(1), at_least: 8 };
        assert_eq!(unique_arrivals(1, rare, SHAPE).unwrap().len(), 8);
        let even = Pace { gaps: Gaps::Every(Duration::from_secs(4)), duration: Duration::ZERO, at_least: 3 };
        let times: Vec<u64> =
            unique_arrivals(1, even, SHAPE).unwrap().iter().map(|arrival| arrival.at.as_secs()).collect();
        assert_eq!(times, [0, 4, 8]);
        let endless = Pace { gaps: Gaps::Poisson(1e6), duration: Duration::from_secs(86_400), at_least: 1 };
        let failure = unique_arrivals(1, endless, SHAPE).unwrap_err().to_string();
        assert!(failure.contains("--duration") && failure.contains("1000000"), "{failure}");
    }

    #[test]
    fn unique_prompts_share_nothing_and_streams_differ_in_every_turn() {
        let pace = Pace { gaps: Gaps::Poisson(1.0), duration: Duration::ZERO, at_least: 50 };
        let workload = workload(unique_arrivals(1, pace, SHAPE).unwrap());
        let mut prompts: Vec<Vec<u32>> =
            workload.arrivals.iter().map(|arrival| workload.ask(arrival).prompt).collect();
        assert!(prompts.iter().all(|prompt| prompt.len() == 64));
        prompts.extend((0..8).flat_map(|nth| (0..3).map(move |turn| (nth, turn))).map(|(nth, turn)| {
            let ask = workload.stream(nth, turn);
            assert_eq!((ask.prompt.len(), ask.output_tokens), (16, 500));
            ask.prompt
        }));
        prompts.iter_mut().for_each(|prompt| prompt.truncate(16));
        prompts.sort();
        prompts.dedup();
        assert_eq!(prompts.len(), 50 + 24);
    }

    #[test]
    fn prompts_share_exactly_the_blocks_that_have_one_name() {
        let arrival = |ids: &[u64], tokens| Arrival {
            at: Duration::ZERO,
            prompt: Prompt::Blocks { ids: ids.to_vec(), block: 512, tokens },
            output_tokens: 4,
        };
        let arrivals = vec![arrival(&[7, 8, 9], 1300), arrival(&[7, 8, 10], 1536), arrival(&[0], 1)];
        let workload = workload(arrivals);
        let asks: Vec<Ask> = workload.arrivals.iter().map(|arrival| workload.ask(arrival)).collect();
        assert_eq!(asks.iter().map(|ask| ask.prompt.len()).collect::<Vec<_>>(), [1300, 1536, 1]);
        assert_eq!(asks[0].prompt[..1024], asks[1].prompt[..1024]);
        assert_ne!(asks[0].prompt[1024..1300], asks[1].prompt[1024..1300]);
        assert!(asks.iter().flat_map(|ask| &ask.prompt).all(|id| (FIRST_ID..256).contains(id)));
        assert_eq!(workload.longest_prompt(), 1536);
    }
}
