//! The stall test: streams that decode in the background, and prompts that arrive beside them.
//!
//! Only the background streams' gaps count as ITL: what a newcomer's prefill does to those who are already reading.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::options::{BenchOptions, Lengths};
use super::random::Random;
use super::report::{Measured, Stall};
use super::request::{Asks, Record, measure};
use crate::client::{Client, ClientError};
use crate::exit::Failure;

/// Tokens of a background stream's own prompt: one block.
const STREAM_PROMPT_TOKENS: u32 = 16;
/// Random sequences: background prompts count from 0, arriving prompts from here.
const FIRST_ARRIVAL: u64 = 1 << 32;
/// The sequence that arrival times are drawn from.
const TIMES: u64 = u64::MAX;

/// Runs the test; ends when every arriving prompt was answered.
///
/// # Errors
/// [`Failure::Unexpected`] when a background stream can't be had.
pub(super) async fn run(client: &Client, options: &BenchOptions, num_streams: u32) -> Result<Stall, Failure> {
    let (stop, stopped) = watch::channel(false);
    let (began, mut beginnings) = tokio::sync::mpsc::channel(num_streams as usize);
    let mut streams = JoinSet::new();
    for nth in 0..num_streams {
        let asks = Asks {
            seed: options.seed,
            vocab: options.vocab,
            prompt_tokens: Lengths { low: STREAM_PROMPT_TOKENS, high: STREAM_PROMPT_TOKENS },
            output_tokens: Lengths { low: options.stream_tokens, high: options.stream_tokens },
        };
        let background =
            Background { client: client.clone(), asks, nth, num_streams, stopped: stopped.clone() };
        let began = began.clone();
        streams.spawn(async move { background.run(began).await });
    }
    drop(began);
    for _ in 0..num_streams {
        let first = tokio::time::timeout(options.request_timeout, beginnings.recv()).await;
        match first {
            Ok(Some(Ok(()))) => {}
            Ok(Some(Err(error))) => return Err(Failure::Unexpected(format!("a background stream: {error}"))),
            _ => return Err(Failure::Unexpected("a background stream got no token in time".to_owned())),
        }
    }
    let quiet_start = Instant::now();
    tokio::time::sleep(options.quiet).await;
    let start = Instant::now();
    let arrivals = arrive(client, options).await;
    let end = Instant::now();
    // No receiver left means that every stream has ended by itself.
    let _ = stop.send(true);
    let mut stall = Stall::new(arrivals, end - start);
    while let Some(ended) = streams.join_next().await {
        let (records, errors) = ended.map_err(|error| Failure::Unexpected(error.to_string()))?;
        for record in &records {
            stall.add_stream(record, [quiet_start, start, end]);
        }
        stall.num_stream_errors += errors;
    }
    Ok(stall)
}

/// One background stream, started again whenever it ends.
struct Background {
    client: Client,
    asks: Asks,
    nth: u32,
    num_streams: u32,
    stopped: watch::Receiver<bool>,
}

impl Background {
    /// Reports once whether the first token came; gives all records and the number of errors.
    async fn run(mut self, began: tokio::sync::mpsc::Sender<Result<(), ClientError>>) -> (Vec<Record>, u64) {
        let (mut records, mut num_errors) = (Vec::new(), 0);
        let mut turn: u64 = 0;
        loop {
            let ask = self.asks.nth(u64::from(self.nth) + turn * u64::from(self.num_streams));
            let mut record = Record::new(Instant::now());
            let result = tokio::select! {
                biased;
                result = measure(&self.client, &ask, &mut record, || {
                    // Later turns have nothing to report; the channel has room for each stream's first.
                    if turn == 0 { let _ = began.try_send(Ok(())); }
                }) => result,
                _ = self.stopped.wait_for(|stopped| *stopped) => {
                    records.push(record);
                    return (records, num_errors);
                }
            };
            records.push(record);
            if let Err(error) = result {
                num_errors += 1;
                let _ = began.try_send(Err(error));
                // A cluster that refuses at once must not be asked in a tight loop.
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            if *self.stopped.borrow() {
                return (records, num_errors);
            }
            turn += 1;
        }
    }
}

/// Sends the arriving prompts at their times and waits for all answers.
async fn arrive(client: &Client, options: &BenchOptions) -> Measured {
    let every = options.arrival_every.unwrap_or(Duration::from_secs(2)).as_secs_f64();
    let mut random = Random::new(options.seed, TIMES);
    let lengths = |tokens| Lengths { low: tokens, high: tokens };
    let asks = Asks {
        seed: options.seed,
        vocab: options.vocab,
        prompt_tokens: lengths(options.arrival_prompt_tokens),
        output_tokens: lengths(options.arrival_output_tokens),
    };
    let start = Instant::now();
    let mut due = start;
    let mut running = JoinSet::new();
    for nth in 0..u64::from(options.arrivals) {
        tokio::time::sleep_until(due.into()).await;
        let (client, timeout) = (client.clone(), options.request_timeout);
        running.spawn(async move {
            let mut record = Record::new(due);
            let ask = asks.nth(FIRST_ARRIVAL + nth);
            let result = tokio::time::timeout(timeout, measure(&client, &ask, &mut record, || {})).await;
            (record, result.unwrap_or_else(|_| Err(ClientError::Broken("timed out".to_owned()))))
        });
        let gap = options.arrival_rate.map_or(every, |rate| random.exponential(rate));
        due += Duration::from_secs_f64(gap);
    }
    let mut measured = Measured::default();
    while let Some(ended) = running.join_next().await {
        match ended {
            Ok((record, Ok(()))) => measured.add(&record),
            Ok((_, Err(error))) => measured.error(&error.kind()),
            Err(_) => measured.error("load_generator"),
        }
    }
    measured.duration = start.elapsed();
    measured
}
