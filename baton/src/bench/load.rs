//! The load itself: a closed loop of users, or open arrivals.

use std::time::{Duration, Instant};

use baton_sim::workload::Random;
use tokio::task::JoinSet;

use super::options::BenchOptions;
use super::report::Measured;
use super::request::{Asks, Record, measure};
use crate::client::{Client, ClientError};

/// Requests in flight at most in an open loop; more arrivals are counted as errors of this side.
const MAX_IN_FLIGHT: usize = 4096;
/// The random sequence that arrival times are drawn from; prompts use the low numbers.
const ARRIVALS: u64 = u64::MAX;

type Ended = (Record, Result<(), ClientError>);

/// Runs until the limits of the options are reached and every request has ended.
pub(super) async fn run(client: &Client, options: &BenchOptions) -> Measured {
    let asks = Asks {
        seed: options.seed,
        vocab: options.vocab,
        prompt_tokens: options.prompt_tokens,
        output_tokens: options.output_tokens,
    };
    let start = Instant::now();
    let mut load = Load {
        client: client.clone(),
        asks,
        timeout: options.request_timeout,
        limit: options.request_limit(),
        until: options.duration.and_then(|duration| start.checked_add(duration)),
        num_sent: 0,
        running: JoinSet::new(),
        measured: Measured::default(),
    };
    match options.rate {
        Some(rate) => load.open_loop(rate, options.seed).await,
        None => load.closed_loop(options.concurrency as usize).await,
    }
    load.measured.duration = start.elapsed();
    load.measured
}

struct Load {
    client: Client,
    asks: Asks,
    timeout: Duration,
    limit: u64,
    until: Option<Instant>,
    num_sent: u64,
    running: JoinSet<Ended>,
    measured: Measured,
}

impl Load {
    fn may_send(&self) -> bool {
        self.num_sent < self.limit && self.until.is_none_or(|until| Instant::now() < until)
    }

    async fn closed_loop(&mut self, users: usize) {
        while self.running.len() < users && self.may_send() {
            self.send(Instant::now());
        }
        // Each end lets the same user send again.
        while let Some(ended) = self.running.join_next().await {
            self.note(ended);
            if self.may_send() {
                self.send(Instant::now());
            }
        }
    }

    async fn open_loop(&mut self, rate: f64, seed: u64) {
        let mut random = Random::new(seed, ARRIVALS);
        let mut due = Instant::now();
        while self.may_send() {
            tokio::select! {
                () = tokio::time::sleep_until(due.into()) => {
                    if self.running.len() < MAX_IN_FLIGHT {
                        // Measured from the planned moment: being late must not hide a queue.
                        self.send(due);
                    } else {
                        self.num_sent += 1;
                        self.measured.error("load_generator_full");
                    }
                    due += Duration::from_secs_f64(random.exponential(rate));
                }
                Some(ended) = self.running.join_next() => self.note(ended),
            }
        }
        while let Some(ended) = self.running.join_next().await {
            self.note(ended);
        }
    }

    fn send(&mut self, start: Instant) {
        let (client, asks, nth, timeout) = (self.client.clone(), self.asks, self.num_sent, self.timeout);
        self.num_sent += 1;
        self.running.spawn(async move { one(&client, asks, nth, Record::new(start), timeout).await });
    }

    fn note(&mut self, ended: Result<Ended, tokio::task::JoinError>) {
        match ended {
            Ok((record, Ok(()))) => self.measured.add(&record),
            Ok((_, Err(error))) => self.measured.error(&error.kind()),
            Err(_) => self.measured.error("load_generator"),
        }
    }
}

/// One request within its time.
async fn one(client: &Client, asks: Asks, nth: u64, mut record: Record, timeout: Duration) -> Ended {
    let ask = asks.nth(nth);
    let result = tokio::time::timeout(timeout, measure(client, &ask, &mut record, || {})).await;
    let result = result.unwrap_or_else(|_| Err(ClientError::Broken("timed out".to_owned())));
    (record, result)
}
