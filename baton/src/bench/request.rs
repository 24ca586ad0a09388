//! One measured request.

use std::time::{Duration, Instant};

use baton_sim::workload::{Lengths, Random};
use serde_json::json;

use crate::client::{Client, ClientError, KvReport};

/// Prompts use ids from here up: the first ones are often special tokens.
pub(super) const FIRST_ID: u32 = 20;

/// What one request asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ask {
    /// The prompt as token ids, unlike any other's from its first block on.
    pub(super) prompt: Vec<u32>,
    /// Tokens wanted.
    pub(super) output_tokens: u32,
}

/// Makes the requests of one run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asks {
    pub(super) seed: u64,
    pub(super) vocab: u32,
    pub(super) prompt_tokens: Lengths,
    pub(super) output_tokens: Lengths,
}

impl Asks {
    /// The `nth` request: a function of the seed alone, so that two runs load a cluster alike.
    pub(super) fn nth(&self, nth: u64) -> Ask {
        let mut random = Random::new(self.seed, nth);
        let length = random.between(self.prompt_tokens.low, self.prompt_tokens.high);
        let output_tokens = random.between(self.output_tokens.low, self.output_tokens.high);
        let prompt = (0..length).map(|_| random.between(FIRST_ID, self.vocab - 1)).collect();
        Ask { prompt, output_tokens }
    }
}

/// When the tokens of one request came.
#[derive(Debug, Clone)]
pub(super) struct Record {
    /// When it was sent, or should have been.
    pub(super) start: Instant,
    /// When each event with tokens arrived.
    pub(super) arrivals: Vec<Instant>,
    /// Tokens of all events.
    pub(super) num_tokens: u64,
    /// Tokens that shared an event with an earlier one: gaps that can't be seen from here.
    pub(super) num_merged: u64,
    /// When the stream was complete.
    pub(super) end: Instant,
    /// What the router says of the transfer of its KV.
    pub(super) kv: Option<KvReport>,
}

impl Record {
    pub(super) fn new(start: Instant) -> Self {
        Self { start, arrivals: Vec::new(), num_tokens: 0, num_merged: 0, end: start, kv: None }
    }

    /// Time to the first token.
    pub(super) fn ttft(&self) -> Option<Duration> {
        self.arrivals.first().map(|first| first.saturating_duration_since(self.start))
    }

    /// Gaps between events with tokens, each with the moment it ended.
    pub(super) fn gaps(&self) -> impl Iterator<Item = (Instant, Duration)> {
        let next = self.arrivals.iter().skip(1);
        self.arrivals
            .iter()
            .zip(next)
            .map(|(before, after)| (*after, after.saturating_duration_since(*before)))
    }

    /// Mean time of an output token after the first.
    pub(super) fn tpot(&self) -> Option<Duration> {
        let (first, last) = (self.arrivals.first()?, self.arrivals.last()?);
        let rest = u32::try_from(self.num_tokens.checked_sub(1)?).ok().filter(|rest| *rest > 0)?;
        Some(last.saturating_duration_since(*first) / rest)
    }
}

/// Sends one request and notes when its tokens come, into `record`, so that what came before a failure or a cancelled
/// wait is not lost. `on_first` is called at the first token.
///
/// # Errors
/// The client's.
pub(super) async fn measure(
    client: &Client,
    ask: &Ask,
    record: &mut Record,
    mut on_first: impl FnMut(),
) -> Result<(), ClientError> {
    let body = json!({
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "stream": true,
        "ignore_eos": true,
        "return_token_ids": true,
        "stream_options": {"include_usage": true},
    });
    let mut events = client.stream("/v1/completions", &body).await?;
    while let Some(chunk) = events.next().await? {
        let num_tokens = chunk.num_tokens() as u64;
        if num_tokens > 0 {
            if record.arrivals.is_empty() {
                on_first();
            }
            record.arrivals.push(Instant::now());
            record.num_tokens += num_tokens;
            record.num_merged += num_tokens - 1;
        }
        record.kv = chunk.baton.and_then(|report| report.kv).or(record.kv);
    }
    record.end = Instant::now();
    if record.num_tokens < u64::from(ask.output_tokens) {
        let reason = format!("{} of {} tokens came", record.num_tokens, ask.output_tokens);
        return Err(ClientError::Broken(reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_repeat_with_their_seed_and_share_no_prefix() {
        let lengths = Lengths { low: 16, high: 64 };
        let asks =
            Asks { seed: 1, vocab: 256, prompt_tokens: lengths, output_tokens: Lengths { low: 4, high: 4 } };
        assert_eq!(asks.nth(5), asks.nth(5));
        let mut starts: Vec<Vec<u32>> = (0..500).map(|nth| asks.nth(nth).prompt[..16].to_vec()).collect();
        assert!((0..500).all(|nth| (16..=64).contains(&asks.nth(nth).prompt.len())));
        starts.sort();
        starts.dedup();
        assert_eq!(starts.len(), 500);
    }

    #[test]
    fn times_of_a_record_are_differences_of_its_events() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let record = Record {
            start,
            arrivals: vec![at(10), at(20), at(50)],
            num_tokens: 5,
            num_merged: 2,
            end: at(51),
            kv: None,
        };
        assert_eq!(record.ttft(), Some(Duration::from_millis(10)));
        let gaps: Vec<Duration> = record.gaps().map(|(_, gap)| gap).collect();
        assert_eq!(gaps, [Duration::from_millis(10), Duration::from_millis(30)]);
        assert_eq!(record.tpot(), Some(Duration::from_millis(10)));
        assert_eq!(Record::new(start).tpot(), None);
    }
}
