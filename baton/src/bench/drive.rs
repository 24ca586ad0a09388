//! Runs a workload against a cluster: streams that decode in the background, and requests that arrive beside them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::request::{Record, measure};
use super::workload::Workload;
use crate::client::{Client, ClientError};
use crate::exit::Failure;

/// Arrivals in flight at most; more are counted as errors of this side.
const MAX_IN_FLIGHT: usize = 4096;

/// Everything that was seen from here.
#[derive(Debug, Clone)]
pub(super) struct Run {
    /// When all streams had begun.
    pub(super) quiet: Instant,
    /// When the first request arrived.
    pub(super) start: Instant,
    /// When the last one was answered.
    pub(super) end: Instant,
    /// Every background stream; one that was cut off at the end has an `end` that equals its start.
    pub(super) streams: Vec<Record>,
    /// Background streams that broke off.
    pub(super) num_stream_errors: u64,
    /// Arrivals that were answered in full.
    pub(super) arrivals: Vec<Record>,
    /// Arrivals that were not, by kind.
    pub(super) errors: BTreeMap<String, u64>,
}

impl Run {
    /// Gaps of those who are read while others arrive, by when they end, in `from..=to`: of the background streams, or of the
    /// arrivals themselves where there are none.
    pub(super) fn victims_gaps(
        &self,
        from: Instant,
        to: Instant,
    ) -> impl Iterator<Item = (Instant, Duration)> {
        let victims = self.victims();
        let gaps = victims.iter().flat_map(Record::gaps).filter(move |(at, _)| (from..=to).contains(at));
        let silences = victims.iter().filter_map(move |record| silence(record, to));
        gaps.chain(silences.filter(move |_| to == self.end))
    }

    /// The streams, or without any the arrivals.
    pub(super) fn victims(&self) -> &[Record] {
        if self.streams.is_empty() { &self.arrivals } else { &self.streams }
    }

    /// Background streams that came to their end.
    pub(super) fn ended_streams(&self) -> impl Iterator<Item = &Record> {
        self.streams.iter().filter(|record| record.end > record.start && record.end > self.start)
    }

    /// Tokens that came while requests arrived.
    pub(super) fn num_tokens_in_window(&self) -> u64 {
        let in_window = |at: &&Instant| (self.start..=self.end).contains(*at);
        let records = self.streams.iter().chain(&self.arrivals);
        records.map(|record| record.arrivals.iter().filter(in_window).count() as u64).sum()
    }
}

/// A stream that was silent to the very end shows its stall only in a gap that has not ended: it counts when it is already the
/// stream's longest, and is left out when it is an ordinary gap cut short.
fn silence(record: &Record, end: Instant) -> Option<(Instant, Duration)> {
    let silence = end.saturating_duration_since(*record.arrivals.last()?);
    let longest = record.gaps().map(|(_, gap)| gap).max();
    (record.end == record.start && Some(silence) > longest).then_some((end, silence))
}

/// What happens while a workload runs.
pub(super) trait Observer {
    /// The streams have had their quiet time; requests arrive from now on.
    fn arrivals_begin(&mut self) -> impl Future<Output = Result<(), Failure>>;
    /// The last arrival was answered; the streams still run.
    fn arrivals_ended(&mut self) -> impl Future<Output = Result<(), Failure>>;
}

/// Nobody looks.
pub(super) struct Unobserved;

impl Observer for Unobserved {
    async fn arrivals_begin(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    async fn arrivals_ended(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

/// Runs it; ends when every arrival was answered. A request that takes longer than `timeout` counts as an error.
///
/// # Errors
/// [`Failure::Unexpected`] when a background stream can't be had; the observer's.
pub(super) async fn drive(
    client: &Client,
    workload: Workload,
    timeout: Duration,
    observer: &mut impl Observer,
) -> Result<Run, Failure> {
    let workload = Arc::new(workload);
    let (stop, stopped) = watch::channel(false);
    let mut streams = start_streams(client, &workload, timeout, &stopped).await?;
    let quiet = Instant::now();
    tokio::time::sleep(workload.quiet).await;
    observer.arrivals_begin().await?;
    let start = Instant::now();
    let (arrivals, errors) = arrive(client, &workload, timeout, start).await;
    let end = Instant::now();
    observer.arrivals_ended().await?;
    // No receiver left means that every stream has ended by itself.
    let _ = stop.send(true);
    let mut run = Run { quiet, start, end, streams: Vec::new(), num_stream_errors: 0, arrivals, errors };
    while let Some(ended) = streams.join_next().await {
        let (records, errors) = ended.map_err(|error| Failure::Unexpected(error.to_string()))?;
        run.streams.extend(records);
        run.num_stream_errors += errors;
    }
    Ok(run)
}

/// Starts the background and waits until each stream has its first token.
async fn start_streams(
    client: &Client,
    workload: &Arc<Workload>,
    timeout: Duration,
    stopped: &watch::Receiver<bool>,
) -> Result<JoinSet<(Vec<Record>, u64)>, Failure> {
    let num = workload.streams.num;
    let (began, mut beginnings) = mpsc::channel(num.max(1) as usize);
    let mut streams = JoinSet::new();
    for nth in 0..num {
        let background = Background {
            client: client.clone(),
            workload: Arc::clone(workload),
            nth,
            stopped: stopped.clone(),
        };
        streams.spawn(background.run(began.clone()));
    }
    drop(began);
    for _ in 0..num {
        match tokio::time::timeout(timeout, beginnings.recv()).await {
            Ok(Some(Ok(()))) => {}
            Ok(Some(Err(error))) => return Err(Failure::Unexpected(format!("a background stream: {error}"))),
            _ => return Err(Failure::Unexpected("a background stream got no token in time".to_owned())),
        }
    }
    Ok(streams)
}

/// One background stream, started again whenever it ends.
struct Background {
    client: Client,
    workload: Arc<Workload>,
    nth: u32,
    stopped: watch::Receiver<bool>,
}

impl Background {
    /// Reports once whether the first token came; gives all records and the number of errors.
    async fn run(mut self, began: mpsc::Sender<Result<(), ClientError>>) -> (Vec<Record>, u64) {
        let (mut records, mut num_errors) = (Vec::new(), 0);
        let mut turn: u64 = 0;
        loop {
            let ask = self.workload.stream(self.nth, turn);
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

/// Sends the arriving requests at their times and waits for all answers.
async fn arrive(
    client: &Client,
    workload: &Workload,
    timeout: Duration,
    start: Instant,
) -> (Vec<Record>, BTreeMap<String, u64>) {
    let mut running = JoinSet::new();
    let mut ended = Ended::default();
    for arrival in &workload.arrivals {
        // Measured from the planned moment: being late must not hide a queue.
        let due = start + arrival.at;
        let ask = workload.ask(arrival);
        tokio::time::sleep_until(due.into()).await;
        while let Some(outcome) = running.try_join_next() {
            ended.note(outcome);
        }
        if running.len() >= MAX_IN_FLIGHT {
            ended.count("load_generator_full");
            continue;
        }
        let client = client.clone();
        running.spawn(async move {
            let mut record = Record::new(due);
            let result = tokio::time::timeout(timeout, measure(&client, &ask, &mut record, || {})).await;
            (record, result.unwrap_or_else(|_| Err(ClientError::Broken("timed out".to_owned()))))
        });
    }
    while let Some(outcome) = running.join_next().await {
        ended.note(outcome);
    }
    ended.records.sort_by_key(|record| record.start);
    (ended.records, ended.errors)
}

/// Arrivals that have ended.
#[derive(Debug, Default)]
struct Ended {
    records: Vec<Record>,
    errors: BTreeMap<String, u64>,
}

impl Ended {
    fn note(&mut self, outcome: Result<(Record, Result<(), ClientError>), tokio::task::JoinError>) {
        match outcome {
            Ok((record, Ok(()))) => self.records.push(record),
            Ok((_, Err(error))) => self.count(&error.kind()),
            Err(_) => self.count("load_generator"),
        }
    }

    fn count(&mut self, kind: &str) {
        *self.errors.entry(kind.to_owned()).or_default() += 1;
    }
}
