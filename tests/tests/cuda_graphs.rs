//! Decode steps as CUDA graphs, on a driver that captures and replays them: the same bits as without, whatever the batch does; nothing written by padding; and
//! whatever is frozen at capture is found.

use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use baton_engine::{CudaArena, CudaEngine, CudaEngineConfig, Quantize};
use baton_kv::{BlockMemory, BlockOrder, BlockPool, BlockRun, BlockTable, KvDtype};
use baton_model::Model;
use baton_scheduler::{
    BlockCopy, Engine, Flow, RowSampling, SamplingParams, SequenceId, StepOutput, StepPlan, StepPoint,
};
use baton_tests::cluster::{greedy, strings, with};
use baton_tests::fake_cuda::FakeCuda;
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, EventStream, Turn};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const NUM_BLOCKS: usize = 120;

fn engine(graphs: bool, quantize: Quantize) -> (CudaEngine, Arc<CudaArena>) {
    let config = CudaEngineConfig {
        ordinal: 0,
        num_blocks: NUM_BLOCKS,
        block_size: 16,
        kv_dtype: KvDtype::F16,
        quantize,
        graphs,
        max_step_tokens: 256,
    };
    CudaEngine::new(&Model::tiny(), &config).expect("a CUDA engine")
}

/// All bytes of an arena.
fn contents(arena: &CudaArena) -> Vec<u8> {
    let pool = BlockPool::new(NUM_BLOCKS);
    let mut table = BlockTable::new();
    table.extend(pool.allocate(NUM_BLOCKS).expect("all blocks"));
    let lease = table.read_lease();
    let mut bytes = Vec::new();
    for layer in 0..arena.layout().num_layers {
        let run = BlockRun { layer, first: 0, num_blocks: NUM_BLOCKS };
        arena
            .read_blocks(&lease, run, BlockOrder::Own, &mut |piece| bytes.extend_from_slice(piece))
            .expect("blocks");
    }
    bytes
}

/// A sequence as the scheduler would keep it.
struct Sequence {
    id: u64,
    tokens: Vec<u32>,
    blocks: Vec<u32>,
}

impl Sequence {
    fn sampling(&self) -> RowSampling {
        // Drawing by chance is what takes longest on this driver.
        let temperature = if self.id.is_multiple_of(3) { 1.5 } else { 0.0 };
        let params =
            SamplingParams { temperature, top_p: 0.95, top_k: 50, min_p: 0.0, seed: self.id * 7 + 1 };
        RowSampling { params, sequence: self.id as u32, position: self.tokens.len() as u32 }
    }
}

/// A day in the life of a decode worker: sequences come, decode, end, give way, come back, and share blocks until they write.
struct Day {
    random: Random,
    running: Vec<Sequence>,
    waiting: Vec<Sequence>,
    free: Vec<u32>,
    next_id: u64,
    most: usize,
}

impl Day {
    fn new(seed: u64, most: usize) -> Day {
        let free = (0..NUM_BLOCKS as u32).rev().collect();
        Day { random: Random::new(seed), running: Vec::new(), waiting: Vec::new(), free, next_id: 1, most }
    }

    fn chance(&mut self, of: usize) -> bool {
        self.random.within(0..of) == 0
    }

    /// Blocks for so many tokens of a sequence; false if there are none.
    fn grow(free: &mut Vec<u32>, sequence: &mut Sequence) -> bool {
        let missing = sequence.tokens.len().div_ceil(16).saturating_sub(sequence.blocks.len());
        if missing > free.len() {
            return false;
        }
        sequence.blocks.extend(free.split_off(free.len() - missing));
        true
    }

    fn arrive(&mut self) {
        if self.running.len() + self.waiting.len() < self.most && self.chance(4) {
            let length = self.random.within(1..130);
            let tokens = self.random.tiny_prompt(length);
            self.waiting.push(Sequence { id: self.next_id, tokens, blocks: Vec::new() });
            self.next_id += 1;
        }
    }

    /// Somebody hangs up, or gives way.
    fn leave(&mut self) {
        let (ends, gives_way) = (self.chance(12), self.chance(15));
        if self.running.len() > 1 && (ends || gives_way) {
            let nth = self.random.within(0..self.running.len());
            let mut sequence = self.running.remove(nth);
            self.free.append(&mut sequence.blocks);
            if gives_way {
                self.waiting.push(sequence);
            }
        }
    }

    /// Somebody's last block was shared: it is copied before it is written.
    fn copy(&mut self, plan: &mut StepPlan) {
        if self.running.is_empty() || self.free.is_empty() || !self.chance(6) {
            return;
        }
        let nth = self.random.within(0..self.running.len());
        if let (Some(last), Some(to)) = (self.running[nth].blocks.last_mut(), self.free.pop()) {
            plan.copies.push(BlockCopy { from: *last, to });
            let from = std::mem::replace(last, to);
            self.free.insert(0, from);
        }
    }

    /// The next step, and who is in which row.
    fn plan(&mut self) -> (StepPlan, Vec<usize>) {
        let mut plan = StepPlan::default();
        self.arrive();
        self.leave();
        self.copy(&mut plan);
        let Self { running, free, .. } = self;
        let mut rows = Vec::new();
        for (nth, sequence) in running.iter_mut().enumerate() {
            if Self::grow(free, sequence) {
                let last = sequence.tokens.len() - 1;
                let (token, blocks) = (&sequence.tokens[last..], &sequence.blocks);
                plan.push(SequenceId(sequence.id), last, token, blocks, &[sequence.sampling()]);
                rows.push(nth);
            }
        }
        let budget = 256 - plan.tokens.len();
        if let Some(mut sequence) = self.waiting.pop() {
            if sequence.tokens.len() <= budget && Self::grow(&mut self.free, &mut sequence) {
                let samplings = [sequence.sampling()];
                plan.push(SequenceId(sequence.id), 0, &sequence.tokens, &sequence.blocks, &samplings);
                rows.push(self.running.len());
                self.running.push(sequence);
            } else {
                self.waiting.push(sequence);
            }
        }
        (plan, rows)
    }
}

fn run(engine: &mut dyn Engine, plan: &StepPlan) -> Result<StepOutput, String> {
    let mut output = StepOutput::default();
    engine.step(plan, &mut output, &mut |_| Flow::Continue).map_err(|error| error.to_string())?;
    Ok(output)
}

/// Runs a day on two engines.
///
/// # Errors
/// What is not the same.
fn same_day(seed: u64, num_steps: usize, most: usize, engines: [&mut CudaEngine; 2]) -> Result<(), String> {
    let [ours, theirs] = engines;
    let mut day = Day::new(seed, most);
    for step in 0..num_steps {
        let (plan, rows) = day.plan();
        let (output, other) = (run(ours, &plan)?, run(theirs, &plan)?);
        // Tokens and the bits of their log-probabilities.
        let bits = |output: &StepOutput| -> Vec<(u32, u32)> {
            output.sampled.iter().map(|sampled| (sampled.token, sampled.logprob.to_bits())).collect()
        };
        if bits(&output) != bits(&other) {
            return Err(format!("step {step} of {} rows gives other tokens", plan.rows.len()));
        }
        for (sampled, nth) in output.sampled.iter().zip(rows) {
            day.running[nth].tokens.push(sampled.token);
        }
        // Contexts stay within what the blocks hold.
        let (old, rest): (Vec<_>, Vec<_>) = day.running.drain(..).partition(|it| it.tokens.len() > 240);
        day.running = rest;
        old.into_iter().for_each(|sequence| day.free.extend(sequence.blocks));
    }
    Ok(())
}

#[test]
fn bits_are_the_same_with_graphs_and_without_whatever_the_batch_does() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let mut random = Random::from_env("cuda_graphs");
    let (held, before) = (fake.counts().held, fake.graph_counts());
    for quantize in [Quantize::None, Quantize::Int8] {
        let (mut on, arena) = engine(true, quantize);
        let (mut off, other) = engine(false, quantize);
        same_day(random.next_u64(), 50, 7, [&mut on, &mut off]).expect("the same");
        // Nobody wrote anything but its own KV: padding neither.
        assert!(contents(&arena) == contents(&other), "{quantize}: block memory differs");
    }
    let after = fake.graph_counts();
    let (captured, launched) =
        (after.num_captured - before.num_captured, after.num_launched - before.num_launched);
    println!("{captured} graphs, launched {launched} times in 100 steps");
    assert!(captured >= 3 && launched >= 15, "{captured} graphs, launched {launched} times");
    assert_eq!((after.held, fake.counts().held), (before.held, held), "graphs and memory are given back");
}

#[test]
fn a_batch_of_every_size_and_a_context_that_grows_over_tiles_are_the_same_bits() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let mut random = Random::from_env("cuda_graph_sizes");
    let ((mut on, _arena), (mut off, _other)) = (engine(true, Quantize::None), engine(false, Quantize::None));
    let before = fake.graph_counts().num_launched;
    let mut num_steps = 0;
    for num_rows in [1, 3, 8, 9, 17, 40, 66, 100] {
        // Each row has a block of its own; the last one a context that ends a tile, where there are blocks for it.
        let (mut plan, mut fill) = (StepPlan::default(), StepPlan::default());
        let long = num_rows <= 40;
        for nth in 0..num_rows {
            let is_long = long && nth + 1 == num_rows;
            let blocks: Vec<u32> = if is_long { (100..NUM_BLOCKS as u32).collect() } else { vec![nth] };
            let position = if is_long { 127 } else { random.within(0..2) };
            let sampling = RowSampling { params: SamplingParams::GREEDY, sequence: nth, position: 1 };
            let tokens = random.tiny_prompt(position + 1);
            let id = SequenceId(u64::from(nth));
            fill.push(id, 0, &tokens, &blocks, &[]);
            plan.push(id, position, &tokens[position..], &blocks, &[sampling]);
        }
        // What stands before is there already.
        for engine in [&mut on, &mut off] {
            run(engine, &fill).expect("a step");
        }
        for _ in 0..3 {
            let (ours, theirs) =
                (run(&mut on, &plan).expect("a step"), run(&mut off, &plan).expect("a step"));
            assert_eq!(ours.sampled.len(), num_rows as usize);
            assert_eq!(ours.sampled, theirs.sampled, "{num_rows} rows");
            if let Some(row) = plan.rows.last_mut().filter(|_| long) {
                row.position += 1;
            }
            num_steps += 1;
        }
    }
    let launched = fake.graph_counts().num_launched - before;
    // The first of a shape is not a graph; the second tile makes another shape where rows are few.
    assert!(launched >= num_steps / 2, "{launched} of {num_steps}");
}

#[test]
fn what_is_no_plain_decode_step_goes_without_a_graph_and_a_graph_can_be_left() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let (mut engine, _arena) = engine(true, Quantize::None);
    let sampling = RowSampling { params: SamplingParams::GREEDY, sequence: 0, position: 1 };
    let plan = |tokens: &[u32], samplings: &[RowSampling]| {
        let mut plan = StepPlan::default();
        plan.push(SequenceId(1), 0, tokens, &[3], samplings);
        plan
    };
    let mut all = StepPlan::default();
    all.push_all_logits(SequenceId(1), 0, &[65], &[3]);
    let before = fake.graph_counts().num_launched;
    for other in [plan(&[65, 66], &[sampling]), plan(&[65], &[]), plan(&[65], &[sampling; 2]), all] {
        for _ in 0..3 {
            run(&mut engine, &other).expect("a step");
        }
    }
    assert_eq!(fake.graph_counts().num_launched, before);

    let decode = plan(&[65], &[sampling]);
    let wanted = run(&mut engine, &decode).expect("a step").sampled;
    assert_eq!(run(&mut engine, &decode).expect("a step").sampled, wanted);
    let (mut output, mut points) = (StepOutput::default(), Vec::new());
    let stopped = engine.step(&decode, &mut output, &mut |point| {
        points.push(point);
        if point == StepPoint::LayerEnd(1) { Flow::Stop } else { Flow::Continue }
    });
    stopped.expect("a step");
    assert!(output.stopped && output.sampled.is_empty());
    assert_eq!(points, [StepPoint::LayerEnd(0), StepPoint::LayerEnd(1)]);
    assert_eq!(run(&mut engine, &decode).expect("a step").sampled, wanted);
    assert_eq!(fake.graph_counts().num_launched, before + 3);
}

/// One day in a process of its own, since a fault may end it: what [`a_day_elsewhere`] does there.
fn elsewhere(variable: &str, value: &str) -> Output {
    Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "a_day_elsewhere", "--nocapture"])
        .env(DAY, "1")
        .env(variable, value)
        .output()
        .expect("it runs")
}

const DAY: &str = "BATON_GRAPH_DAY";
const FROZEN: &str = "BATON_GRAPH_FROZEN";

/// Only for the tests below.
#[test]
fn a_day_elsewhere() {
    if std::env::var_os(DAY).is_none() {
        return;
    }
    let fake = FakeCuda::build_or_skip().expect("the parent has built it").loaded();
    if let Some((kernel, argument)) = std::env::var(FROZEN).ok().as_deref().and_then(|it| it.split_once(':'))
    {
        fake.freeze(kernel, argument.parse().expect("a number"));
    }
    let ((mut on, _arena), (mut off, _other)) = (engine(true, Quantize::None), engine(false, Quantize::None));
    let outcome = same_day(11, 40, 5, [&mut on, &mut off]);
    println!("captured {} and {outcome:?}", fake.graph_counts().num_captured);
    outcome.expect("the same");
}

/// Faults planted in the driver: one argument of one kernel has in a graph what it had in the first launch.
#[test]
fn an_argument_frozen_at_capture_is_found() {
    let _turn = Turn::take();
    if FakeCuda::build_or_skip().is_none() {
        return;
    }
    let said = |output: &Output| {
        String::from_utf8_lossy(&[output.stdout.clone(), output.stderr.clone()].concat()).into_owned()
    };
    let sound = elsewhere(FROZEN, "");
    assert!(sound.status.success(), "{}", said(&sound));
    for (argument, what) in [
        ("embed_:2", "tokens"),
        ("rope_kv_:7", "positions"),
        ("rope_kv_:8", "slots"),
        ("attend_decode_:3", "rows"),
        ("attend_decode_:4", "items"),
        ("attend_decode_:5", "block tables"),
        ("attend_combine_:2", "rows where tiles are combined"),
        ("sample:4", "samplings"),
    ] {
        let output = elsewhere(FROZEN, argument);
        assert!(!output.status.success(), "{what} are frozen, and nobody notices: {}", said(&output));
    }
}

/// A driver that makes no graph: steps are queued kernel by kernel, and nobody else notices.
#[test]
fn a_driver_that_refuses_graphs_costs_no_token() {
    let _turn = Turn::take();
    if FakeCuda::build_or_skip().is_none() {
        return;
    }
    let output = elsewhere("FAKE_CUDA_NO_GRAPHS", "1");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("captured 0 and Ok"), "{text}");
}

/// Real workers: streams beside each other in a pool that does not hold all of them at once, and one that hangs up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_with_graphs_and_without_give_the_same_tokens() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let mut random = Random::from_env("cuda_graph_workers");
    let bodies: Vec<_> = (0..4)
        .map(|nth| {
            let sampling = json!({"temperature": f64::from(nth) * 0.4, "seed": nth, "stream": true});
            with(greedy(&random.tiny_prompt(60), 110), sampling)
        })
        .collect();
    let mut all = Vec::new();
    for graphs in ["on", "off"] {
        let dir = tempfile::tempdir().expect("a folder");
        let report = dir.path().join("report");
        let device = strings(&["--device", "cuda:0", "--cuda-graphs", graphs]);
        let mut cluster = Cluster::start(ClusterConfig {
            // 512 tokens.
            kv_memory: "256K".into(),
            worker_args: strings(&["--context", "512"]),
            prefill_args: device.clone(),
            decode_args: device,
            max_step_tokens: Some(64),
            env: vec![fake.env(), format!("FAKE_CUDA_GRAPH_REPORT={}", report.display())],
            ..ClusterConfig::default()
        })
        .await;
        let mut tasks = JoinSet::new();
        for (nth, body) in bodies.clone().into_iter().enumerate() {
            let http = cluster.http;
            tasks.spawn(async move {
                let stream = EventStream::post(http, "/v1/completions", &body).await.expect("a stream");
                (nth, stream.completion().await.expect("a whole stream").token_ids)
            });
        }
        let mut left = cluster.stream("/v1/completions", &bodies[0]).await;
        for _ in 0..5 {
            left.next().await.expect("an event");
        }
        drop(left);
        let mut tokens = vec![Vec::new(); bodies.len()];
        while let Some(done) = tasks.join_next().await {
            let (nth, token_ids) = done.expect("no stream failed");
            tokens[nth] = token_ids;
        }
        cluster.wait_baseline(Duration::from_secs(5)).await;
        for worker in cluster.prefill.iter_mut().chain(&mut cluster.decode) {
            worker.process.signal(libc::SIGTERM);
            assert_eq!(worker.process.exit_code(Duration::from_secs(10)), 0, "{}", worker.process.output());
        }
        let text = std::fs::read_to_string(&report).expect("a report");
        let launched: Vec<u64> = text
            .lines()
            .map(|line| {
                serde_json::from_str::<Value>(line).expect("JSON")["launched"].as_u64().expect("a number")
            })
            .collect();
        // The prefill worker has no step that decodes.
        assert_eq!(
            launched.iter().filter(|&&launched| launched > 50).count(),
            usize::from(graphs == "on"),
            "{text}"
        );
        all.push(tokens);
    }
    assert!(all[0].iter().all(|tokens| tokens.len() == 110));
    assert_eq!(all[0], all[1]);
}
