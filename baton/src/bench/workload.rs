//! What is sent when: streams in the background, and requests that arrive beside them. A plain value, so that several clusters
//! can be loaded alike.

use std::time::Duration;

pub(super) use baton_sim::workload::{Arrival, Gaps, Pace, Prompt};
use baton_sim::workload::{Lengths, MAX_ARRIVALS, Random, UniqueShape, turn_tokens};

use super::request::{Ask, Asks, FIRST_ID};
use crate::exit::Failure;

/// Tokens of a background stream's own prompt: one block.
pub(super) const STREAM_PROMPT_TOKENS: u32 = 16;
/// Random sequences: background prompts count from 0, arriving prompts from here.
const FIRST_ARRIVAL: u64 = 1 << 32;
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
        let output = turn_tokens(self.streams.output_tokens, (nth, self.streams.num), turn);
        self.asks(STREAM_PROMPT_TOKENS, output).nth(sequence)
    }

    fn asks(&self, prompt: u32, output: u32) -> Asks {
        let exactly = Lengths::exactly;
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
    let shape = UniqueShape {
        prompt_tokens: Lengths::exactly(shape.prompt_tokens),
        output_tokens: Lengths::exactly(shape.output_tokens),
    };
    baton_sim::workload::unique_arrivals(seed, pace, shape).map_err(|_| {
        let why =
            "a shorter --duration, fewer --arrivals, a lower --arrival-rate or a longer --arrival-every";
        Failure::Usage(format!("more than {MAX_ARRIVALS} arrivals: choose {why}"))
    })
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
    fn a_pace_that_never_ends_is_told_with_the_options_that_make_it() {
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
            let first = [63, 125, 188, 250, 313, 375, 438, 500];
            let tokens = if turn == 0 { first[nth as usize] } else { 500 };
            assert_eq!((ask.prompt.len(), ask.output_tokens), (16, tokens));
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
