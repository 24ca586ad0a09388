//! Telling workers which traces to keep: those that sampling had left out and that turned out to be worth a look.
//!
//! Nobody waits for any of it. What does not fit, or a worker does not take in time, is counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::worker_client::WorkerClient;
use baton_telemetry::metrics::{Counter, RouterMetrics};
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::fleet::Member;

/// Decisions that wait to be sorted by worker.
const MAX_DECISIONS: usize = 1024;
/// Traces that wait for one worker; in one call, at most.
const MAX_WAITING: usize = 256;
/// So many are not kept waiting for more.
const BATCH: usize = 64;
/// How long a decision waits for others, at most, if the worker answers.
const PERIOD: Duration = Duration::from_millis(100);
/// A worker that does not answer within this time is not waited for.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

struct Decision {
    trace_id: [u8; 16],
    workers: Vec<Arc<Member>>,
}

/// Takes decisions. Clones share one queue.
#[derive(Clone)]
pub(crate) struct Keeper {
    decisions: mpsc::Sender<Decision>,
    kept: Counter,
    failed: Counter,
}

/// Decisions on their way.
pub(crate) struct Decisions {
    queue: mpsc::Receiver<Decision>,
    failed: Counter,
}

/// A queue that counts what goes through it, and what it can't tell a worker: one for each trace and worker.
pub(crate) fn queue(metrics: &RouterMetrics) -> (Keeper, Decisions) {
    let (decisions, queue) = mpsc::channel(MAX_DECISIONS);
    let (kept, failed) = (metrics.kept_traces.clone(), metrics.kept_traces_failed.clone());
    (Keeper { decisions, kept, failed: failed.clone() }, Decisions { queue, failed })
}

impl Keeper {
    /// Has these workers keep a trace.
    pub(crate) fn keep(&self, trace_id: [u8; 16], workers: Vec<Arc<Member>>) {
        if workers.is_empty() {
            return;
        }
        self.kept.inc();
        if let Err(mpsc::error::TrySendError::Full(decision) | mpsc::error::TrySendError::Closed(decision)) =
            self.decisions.try_send(Decision { trace_id, workers })
        {
            self.failed.inc_by(decision.workers.len() as u64);
        }
    }
}

/// What one worker is yet to be told.
struct Waiting {
    member: Arc<Member>,
    trace_ids: Vec<Bytes>,
    /// A call is under way: the next one waits for its answer.
    calling: bool,
}

impl Decisions {
    /// Tells workers, until the future is dropped.
    pub(crate) async fn run(mut self) {
        // By address; as many as there are workers.
        let mut waiting: BTreeMap<String, Waiting> = BTreeMap::new();
        let mut calls: JoinSet<(String, usize)> = JoinSet::new();
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let least = tokio::select! {
                decision = self.queue.recv() => match decision {
                    Some(decision) => {
                        self.sort(decision, &mut waiting);
                        BATCH
                    }
                    None => return,
                },
                Some(done) = calls.join_next() => {
                    if let Ok((address, num_failed)) = done {
                        self.failed.inc_by(num_failed as u64);
                        if let Some(worker) = waiting.get_mut(&address) {
                            worker.calling = false;
                        }
                    }
                    BATCH
                }
                _ = ticks.tick() => 1,
            };
            for (address, worker) in &mut waiting {
                if !worker.calling && worker.trace_ids.len() >= least {
                    worker.calling = true;
                    let trace_ids = std::mem::take(&mut worker.trace_ids);
                    calls.spawn(tell(address.clone(), Arc::clone(&worker.member), trace_ids));
                }
            }
        }
    }

    fn sort(&self, decision: Decision, waiting: &mut BTreeMap<String, Waiting>) {
        for member in decision.workers {
            let worker = waiting.entry(member.address.clone()).or_insert_with(|| Waiting {
                member,
                trace_ids: Vec::new(),
                calling: false,
            });
            if worker.trace_ids.len() < MAX_WAITING {
                worker.trace_ids.push(Bytes::copy_from_slice(&decision.trace_id));
            } else {
                self.failed.inc();
            }
        }
    }
}

/// Tells one worker; answers with its address and how many traces it was not told of.
async fn tell(address: String, member: Arc<Member>, trace_ids: Vec<Bytes>) -> (String, usize) {
    let num = trace_ids.len();
    let mut client = WorkerClient::new(member.channel());
    let call = client.keep_traces(v1::KeepTracesRequest { trace_ids });
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(Ok(_)) => (address, 0),
        Ok(Err(status)) => {
            tracing::debug!(worker = address, num, code = %status.code(), "a worker was not told which traces to keep");
            (address, num)
        }
        Err(_) => {
            tracing::debug!(worker = address, num, "a worker did not hear in time which traces to keep");
            (address, num)
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_dispatch::Role;

    use super::*;

    fn worker(address: &str) -> Arc<Member> {
        Arc::new(Member::new(Role::Decode, address.to_owned()).expect("an address"))
    }

    #[tokio::test]
    async fn what_does_not_fit_is_counted_for_each_worker() {
        let metrics = RouterMetrics::new();
        let (keeper, decisions) = queue(&metrics);
        let both = vec![worker("d:1"), worker("d:2")];
        for _ in 0..=MAX_DECISIONS {
            keeper.keep([1; 16], both.clone());
        }
        keeper.keep([2; 16], Vec::new());
        assert_eq!(metrics.kept_traces.get(), MAX_DECISIONS as u64 + 1);
        assert_eq!(metrics.kept_traces_failed.get(), 2);
        drop(decisions);
        keeper.keep([3; 16], both);
        assert_eq!(metrics.kept_traces_failed.get(), 4, "nobody is there to tell them");
    }

    #[tokio::test]
    async fn a_worker_that_does_not_answer_piles_up_no_more_than_one_call() {
        let metrics = RouterMetrics::new();
        let (_, decisions) = queue(&metrics);
        let (slow, mut waiting) = (worker("d:1"), BTreeMap::new());
        for _ in 0..MAX_WAITING + 3 {
            let workers = vec![Arc::clone(&slow), Arc::clone(&slow)];
            decisions.sort(Decision { trace_id: [1; 16], workers }, &mut waiting);
        }
        assert_eq!(waiting["d:1"].trace_ids.len(), MAX_WAITING);
        assert_eq!(metrics.kept_traces_failed.get(), MAX_WAITING as u64 + 6);
    }
}
