//! The loop against an engine that computes nothing but takes its time, layer by layer.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_handoff::{Cause, RequestId};
use baton_kv::{BlockPool, KvDtype, KvLayout};
use baton_scheduler::{
    Engine, EngineError, Finish, FirstToken, Flow, Logits, Origin, Refusal, Sampled, SamplingParams,
    Scheduler, SchedulerConfig, StepOutput, StepPlan, StepPoint,
};
use baton_telemetry::metrics::WorkerMetrics;
use baton_telemetry::trace::Tracing;

use super::*;
use crate::{Clock, Lifecycle, State};

mod cache;
mod groups;
mod stalls;

const LAYERS: usize = 8;
const BLOCKS: usize = 64;
const STALL_THRESHOLD: Duration = Duration::from_millis(20);

struct SlowEngine {
    layout: KvLayout,
    layer_time: Duration,
    /// Of each token beyond the first of a row.
    chunk_token_time: Duration,
    layers_done: Arc<AtomicUsize>,
    fail_after: usize,
}

impl Engine for SlowEngine {
    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn max_step_tokens(&self) -> usize {
        64
    }

    fn vocab_size(&self) -> usize {
        100
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<(), EngineError> {
        output.sampled.clear();
        output.stopped = false;
        self.fail_after = self.fail_after.saturating_sub(1);
        if self.fail_after == 0 {
            return Err(EngineError::Fatal("on purpose".to_owned()));
        }
        let num_more = plan.tokens.len() - plan.rows.len();
        std::thread::sleep(self.chunk_token_time * num_more as u32);
        for layer in 0..LAYERS {
            let due = Instant::now() + self.layer_time;
            while let left = due.saturating_duration_since(Instant::now())
                && !left.is_zero()
            {
                if on_point(StepPoint::Within) == Flow::Stop {
                    output.stopped = true;
                    return Ok(());
                }
                std::thread::sleep(left.min(Duration::from_millis(1)));
            }
            self.layers_done.fetch_add(1, Ordering::SeqCst);
            if on_point(StepPoint::LayerEnd(layer)) == Flow::Stop {
                output.stopped = true;
                return Ok(());
            }
        }
        for (row, planned) in plan.rows.iter().enumerate() {
            let Logits::Sample(wanted) = &planned.logits else { continue };
            for sampling in wanted.clone() {
                let of = plan.samplings[sampling];
                // The token tells its sequence and position.
                let token = of.sequence * 1000 + of.position % 100;
                let (row, sampling) = (row as u32, sampling as u32);
                output.sampled.push(Sampled { row, sampling, token, logprob: -1.0 });
            }
        }
        Ok(())
    }
}

struct Bench {
    steps: StepHandle,
    pool: BlockPool,
    layers_done: Arc<AtomicUsize>,
    lifecycle: Lifecycle,
    metrics: WorkerMetrics,
    clock: Clock,
    join: Option<std::thread::JoinHandle<()>>,
}

impl Bench {
    async fn start(layer_time: Duration, fail_after: usize) -> Self {
        Self::start_with(layer_time, fail_after, None).await
    }

    async fn start_with(layer_time: Duration, fail_after: usize, cache_salt: Option<Vec<u8>>) -> Self {
        Self::start_timed((layer_time, Duration::ZERO), fail_after, cache_salt).await
    }

    /// With times of a layer, and of each token of a chunk beyond the first.
    async fn start_timed(
        (layer_time, chunk_token_time): (Duration, Duration),
        fail_after: usize,
        cache_salt: Option<Vec<u8>>,
    ) -> Self {
        let pool = BlockPool::new(BLOCKS);
        let layers_done = Arc::new(AtomicUsize::new(0));
        let lifecycle = Lifecycle::default();
        lifecycle.set(State::Ready);
        let engine = SlowEngine {
            layout: KvLayout {
                model_digest: [0; 32],
                num_layers: LAYERS,
                num_kv_heads: 1,
                head_dim: 16,
                block_size: 16,
                dtype: KvDtype::F32,
                arrangement: String::new(),
                numerics_id: String::new(),
            },
            layer_time,
            chunk_token_time,
            layers_done: Arc::clone(&layers_done),
            fail_after,
        };
        let config = SchedulerConfig {
            block_size: 16,
            context: 4096,
            max_num_seqs: 16,
            max_queue: 4,
            max_step_tokens: 64,
            local_prefill_tokens: 32,
            max_open_prompts: 2,
            lookahead: 2,
            max_receiving_share: 1.0,
            cache_salt,
            ageing_tokens_per_s: 0.0,
            step_cost: None,
            max_step_ms: 60_000.0,
            max_step_growth: 0.0,
            num_layers: 1,
        };
        let metrics = WorkerMetrics::new();
        let scheduler = Scheduler::new(config, pool.clone());
        let clock = Clock::start();
        let options = StepThreadOptions {
            cpus: None,
            nice: 0,
            clock,
            tracing: Tracing::off(),
            stall_threshold: STALL_THRESHOLD,
        };
        let thread = StepThread::spawn(options, metrics.clone(), lifecycle.clone(), move |_| {
            Ok(Built { engine: Box::new(engine), scheduler })
        })
        .unwrap();
        thread.built.await.unwrap().unwrap();
        let join = Some(thread.join);
        Self { steps: thread.handle, pool, layers_done, lifecycle, metrics, clock, join }
    }

    async fn fast() -> Self {
        Self::start(Duration::ZERO, usize::MAX).await
    }

    async fn submit(&self, origin: Origin, prompt: usize, max_new_tokens: u32) -> Sequence {
        self.steps.submit(submission(origin, prompt, max_new_tokens)).await.unwrap()
    }

    async fn all_blocks_return(&self) {
        for _ in 0..1000 {
            if self.pool.counts().free == BLOCKS {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("blocks did not return: {:?}", self.pool.counts());
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.steps.stop();
        if let Some(join) = self.join.take() {
            join.join().unwrap();
        }
    }
}

fn submission(origin: Origin, prompt: usize, max_new_tokens: u32) -> Submission {
    Submission {
        request: RequestId([1; 16]),
        trace: None,
        origin,
        prompt: vec![1; prompt],
        sampling: SamplingParams::GREEDY,
        num_sequences: 1,
        first_sequence: 0,
        num_generated: 0,
        max_new_tokens,
        stop_tokens: Vec::new(),
        cache: true,
        age: Duration::ZERO,
        priority: 0,
        preempted: false,
        sink: None,
    }
}

async fn next(sequence: &mut Sequence) -> SequenceEvent {
    next_stamped(sequence).await.event
}

async fn next_stamped(sequence: &mut Sequence) -> Stamped {
    let event = tokio::time::timeout(Duration::from_secs(10), sequence.next()).await;
    event.expect("an event within its bound").expect("an event before the end")
}

async fn tokens(sequence: &mut Sequence) -> Vec<u32> {
    let mut tokens = Vec::new();
    loop {
        if let SequenceEvent::Token { token, index, finish, .. } = next(sequence).await {
            assert_eq!(index as usize, tokens.len());
            tokens.push(token);
            if finish == Some(Finish::Length) {
                return tokens;
            }
        }
    }
}

#[tokio::test]
async fn a_local_sequence_is_computed_and_its_tokens_come_in_order() {
    let bench = Bench::fast().await;
    let mut sequence = bench.submit(Origin::Local, 40, 5).await;
    assert_eq!(tokens(&mut sequence).await, [40, 41, 42, 43, 44]);
    assert!(sequence.next().await.is_none());
    bench.all_blocks_return().await;
    assert!(bench.steps.progress() >= 5 * LAYERS as u64);
}

#[tokio::test]
async fn an_idle_loop_wakes_for_a_command_sent_much_later() {
    let bench = Bench::fast().await;
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut sequence = bench.submit(Origin::Local, 3, 1).await;
        assert_eq!(tokens(&mut sequence).await, [3]);
    }
    let load = *bench.steps.load().wait_for(|load| load.idle).await.unwrap();
    assert_eq!(load.counts.running, 0);
}

#[tokio::test]
async fn dropping_the_only_sequence_stops_its_step_within_a_layer() {
    let bench = Bench::start(Duration::from_millis(30), usize::MAX).await;
    let sequence = bench.submit(Origin::Local, 500, 5).await;
    while bench.layers_done.load(Ordering::SeqCst) < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let before = bench.layers_done.load(Ordering::SeqCst);
    drop(sequence);
    bench.all_blocks_return().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let more = bench.layers_done.load(Ordering::SeqCst) - before;
    assert!(more <= 2, "{more} layers were computed after the cancel");
}

#[tokio::test]
async fn a_layer_that_takes_long_is_left_when_nobody_wants_it() {
    let bench = Bench::start(Duration::from_secs(60), usize::MAX).await;
    let sequence = bench.submit(Origin::Local, 500, 5).await;
    bench.steps.load().wait_for(|load| !load.idle).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(sequence);
    bench.all_blocks_return().await;
    assert_eq!(bench.layers_done.load(Ordering::SeqCst), 0);
    // A stop too.
    let _sequence = bench.submit(Origin::Local, 500, 5).await;
    bench.steps.load().wait_for(|load| !load.idle).await.unwrap();
    bench.steps.stop();
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn one_of_two_cancelled_leaves_the_other_whole() {
    let bench = Bench::start(Duration::from_millis(1), usize::MAX).await;
    let mut kept = bench.submit(Origin::Local, 20, 30).await;
    let dropped = bench.submit(Origin::Local, 300, 30).await;
    while bench.layers_done.load(Ordering::SeqCst) < LAYERS {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(dropped);
    assert_eq!(tokens(&mut kept).await, (20..50).collect::<Vec<u32>>());
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn a_remote_sequence_reserves_commits_and_runs() {
    let bench = Bench::fast().await;
    let mut sequence = bench.submit(Origin::Remote, 40, 4).await;
    sequence.reserve().await;
    let SequenceEvent::Reserved { lease, skip_tokens: 0 } = next(&mut sequence).await else {
        panic!("not reserved")
    };
    assert_eq!(lease.len(), 3);
    sequence.notice(Duration::ZERO).await;
    assert!(matches!(next(&mut sequence).await, SequenceEvent::Boundary));
    drop(lease);
    sequence.commit(vec![FirstToken { token: 7, finished: false }], None).await;
    assert!(matches!(
        next(&mut sequence).await,
        SequenceEvent::Started { first_step: None, cached_tokens: 0, avoided: None }
    ));
    for want in 1..4 {
        let SequenceEvent::Token { index, finish, .. } = next(&mut sequence).await else {
            panic!("no token")
        };
        assert_eq!((index, finish.is_some()), (want, want == 3));
    }
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn a_dropped_receiver_keeps_leased_blocks_until_the_lease_ends() {
    let bench = Bench::fast().await;
    let mut sequence = bench.submit(Origin::Remote, 40, 4).await;
    sequence.reserve().await;
    let SequenceEvent::Reserved { lease, skip_tokens: 0 } = next(&mut sequence).await else {
        panic!("not reserved")
    };
    drop(sequence);
    bench.steps.load().wait_for(|load| load.counts.receiving == 0).await.unwrap();
    assert_eq!(bench.pool.counts().free, BLOCKS - 3);
    drop(lease);
    bench.all_blocks_return().await;
}

#[derive(Default)]
struct Record(Mutex<Vec<(Range<usize>, Option<usize>)>>);

impl LayerSink for Record {
    fn layer_done(&self, chunk: Range<usize>, layer: usize) {
        self.0.lock().unwrap().push((chunk, Some(layer)));
    }

    fn tokens_done(&self, num_tokens: usize) {
        self.0.lock().unwrap().push((0..num_tokens, None));
    }
}

#[tokio::test]
async fn a_prefill_is_offered_granted_computed_in_chunks_and_held_until_dropped() {
    let bench = Bench::fast().await;
    let record = Arc::new(Record::default());
    let sink = Arc::clone(&record) as Arc<dyn LayerSink>;
    let mut new = submission(Origin::Prefill, 70, 9);
    new.sink = Some(sink);
    let mut sequence = bench.steps.submit(new).await.unwrap();
    assert!(matches!(next(&mut sequence).await, SequenceEvent::NearHead));
    assert_eq!(bench.pool.counts().held, 0, "nothing is held before the grant");
    sequence.grant(0).await;
    let SequenceEvent::Opened { lease, .. } = next(&mut sequence).await else { panic!("not opened") };
    assert_eq!(lease.len(), 5);
    drop(lease);
    assert!(matches!(next(&mut sequence).await, SequenceEvent::Computed { num_tokens: 64, .. }));
    assert!(matches!(next(&mut sequence).await, SequenceEvent::Computed { num_tokens: 70, .. }));
    let SequenceEvent::Token { token, finish, .. } = next(&mut sequence).await else { panic!("no token") };
    assert_eq!((token, finish), (70, None));
    bench.steps.load().wait_for(|load| load.counts.held == 1).await.unwrap();
    drop(sequence);
    bench.all_blocks_return().await;
    let mut want: Vec<_> = (0..LAYERS).map(|layer| (0..64, Some(layer))).collect();
    want.push((0..64, None));
    want.extend((0..LAYERS).map(|layer| (64..70, Some(layer))));
    want.push((0..70, None));
    assert_eq!(*record.0.lock().unwrap(), want);
}

#[tokio::test]
async fn a_sink_hears_of_cached_tokens_first_and_of_nothing_less_later() {
    let bench = Bench::start_with(Duration::ZERO, usize::MAX, Some(Vec::new())).await;
    tokens(&mut bench.submit(Origin::Local, 50, 1).await).await;
    let record = Arc::new(Record::default());
    let mut new = submission(Origin::Prefill, 70, 9);
    new.sink = Some(Arc::clone(&record) as Arc<dyn LayerSink>);
    let mut sequence = bench.steps.submit(new).await.unwrap();
    assert!(matches!(next(&mut sequence).await, SequenceEvent::NearHead));
    sequence.grant(0).await;
    // Whoever reads the events is late: everything is computed before it looks at the first.
    bench.steps.load().wait_for(|load| load.counts.held == 1).await.unwrap();
    assert!(matches!(next(&mut sequence).await, SequenceEvent::Opened { cached_tokens: 48, .. }));
    let mut want = vec![(0..48, None)];
    want.extend((0..LAYERS).map(|layer| (48..70, Some(layer))));
    want.push((0..70, None));
    assert_eq!(*record.0.lock().unwrap(), want);
}

#[tokio::test]
async fn what_can_never_fit_or_finds_a_full_queue_is_refused() {
    let bench = Bench::fast().await;
    let mut sequence = bench.submit(Origin::Local, 2000, 5).await;
    let SequenceEvent::Refused(refusal) = next(&mut sequence).await else { panic!("not refused") };
    assert!(matches!(refusal, Refusal::TooLarge { max_tokens: 1024, .. }), "{refusal:?}");
    let waiting = [(); 4].map(|()| submission(Origin::Remote, 16, 5));
    let mut kept = Vec::new();
    for new in waiting {
        kept.push(bench.steps.submit(new).await.unwrap());
    }
    let mut last = bench.submit(Origin::Remote, 16, 5).await;
    assert!(matches!(next(&mut last).await, SequenceEvent::Refused(Refusal::QueueFull { max_queue: 4 })));
}

#[tokio::test]
async fn a_reader_that_never_reads_is_cancelled_alone() {
    let bench = Bench::fast().await;
    let mut slow = bench.steps.submit(submission(Origin::Local, 1, 4000)).await.unwrap();
    // The pool of 1,024 tokens would be exceeded by 4,000 tokens: this one asks for what fits.
    let refused = next(&mut slow).await;
    assert!(matches!(refused, SequenceEvent::Refused(_)));
    let pool_tokens = (BLOCKS * 16) as u32;
    let mut slow = bench.submit(Origin::Local, 1, pool_tokens - 1).await;
    let mut other = bench.submit(Origin::Local, 1, 3).await;
    assert_eq!(tokens(&mut other).await.len(), 3);
    bench.all_blocks_return().await;
    let mut num_events = 0;
    while slow.next().await.is_some() {
        num_events += 1;
    }
    assert_eq!((num_events, slow.ended_by()), (1024, Cause::SlowReader));
}

#[tokio::test]
async fn an_engine_failure_ends_every_sequence_and_fails_the_worker() {
    let bench = Bench::start(Duration::ZERO, 3).await;
    // This one only waits; nothing is computed before the other comes.
    let mut second = bench.submit(Origin::Remote, 10, 50).await;
    let mut first = bench.submit(Origin::Local, 10, 50).await;
    while first.next().await.is_some() {}
    while second.next().await.is_some() {}
    assert_eq!((first.ended_by(), second.ended_by()), (Cause::Engine, Cause::Engine));
    let state =
        bench.lifecycle.watch().wait_for(|state| matches!(state, State::Failed(_))).await.unwrap().clone();
    assert_eq!(state, State::Failed("engine failed: on purpose".to_owned()));
    assert!(bench.steps.submit(submission(Origin::Local, 1, 1)).await.is_err());
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn stopping_ends_a_running_step_and_every_sequence() {
    let bench = Bench::start(Duration::from_millis(20), usize::MAX).await;
    let mut sequence = bench.submit(Origin::Local, 100, 50).await;
    while bench.layers_done.load(Ordering::SeqCst) < 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bench.steps.stop();
    while sequence.next().await.is_some() {}
    assert_eq!(sequence.ended_by(), Cause::Draining);
    bench.all_blocks_return().await;
}
