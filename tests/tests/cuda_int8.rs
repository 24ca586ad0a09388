//! 8-bit weights on the CUDA engine, on a driver for machines without a card: the logits of the same weights rounded by the book, near those that are not rounded,
//! the same bits however work is cut, half of the memory.

use std::borrow::Cow;
use std::path::Path;

use baton_engine::{
    CpuEngine, CpuEngineConfig, CudaEngine, CudaEngineConfig, CudaPlan, Precision, Quantize, WeightSource,
};
use baton_kv::KvDtype;
use baton_model::{Model, ModelConfig, ModelError, ModelSource, Tensor, WeightType};
use baton_scheduler::{Engine, Flow, RowSampling, SamplingParams, SequenceId, StepOutput, StepPlan};
use baton_tests::cluster::{greedy, strings};
use baton_tests::fake_cuda::FakeCuda;
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Turn};

const NUM_BLOCKS: usize = 16;
/// Largest difference of an f16 logit from that of the same weights in f32, as for weights of 16 bits.
const F16_BOUND: f32 = 0.15;

const CONFIG: CudaEngineConfig = CudaEngineConfig {
    ordinal: 0,
    num_blocks: NUM_BLOCKS,
    block_size: 16,
    kv_dtype: KvDtype::F16,
    quantize: Quantize::Int8,
    graphs: true,
    max_step_tokens: 128,
};

/// A model whose matrices are rounded here, row by row, and handed on in f32.
struct Rounded<'a>(&'a dyn WeightSource);

impl WeightSource for Rounded<'_> {
    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn digest(&self) -> [u8; 32] {
        self.0.digest()
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.0.tensor(name)?;
        if tensor.rows == 1 {
            return Ok(tensor);
        }
        let values = floats(&tensor);
        let data = values.chunks_exact(tensor.cols).flat_map(rounded).flat_map(f32::to_le_bytes).collect();
        Ok(Tensor { kind: WeightType::F32, data: Cow::Owned(data), ..tensor })
    }
}

fn floats(tensor: &Tensor<'_>) -> Vec<f32> {
    match tensor.kind {
        WeightType::F32 => tensor.data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        // bfloat16 is the upper half of a float.
        WeightType::BF16 => {
            let halves = tensor.data.as_chunks().0.iter();
            halves.map(|&[low, high]| f32::from_le_bytes([0, 0, low, high])).collect()
        }
        other => panic!("{other} is not expected here"),
    }
}

/// A row of 127 levels to either side under its own scale.
fn rounded(row: &[f32]) -> Vec<f32> {
    let scale = row.iter().fold(0f32, |largest, x| largest.max(x.abs())) / 127.0;
    row.iter().map(|x| if scale > 0.0 { (x / scale).round_ties_even() * scale } else { 0.0 }).collect()
}

fn run(engine: &mut dyn Engine, plan: &StepPlan) -> StepOutput {
    let mut output = StepOutput::default();
    engine.step(plan, &mut output, &mut |_| Flow::Continue).expect("a step");
    output
}

/// Logits of all tokens, computed in chunks of these lengths.
fn logits(engine: &mut dyn Engine, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let blocks: Vec<u32> = (0..NUM_BLOCKS as u32).rev().collect();
    let (mut all, mut start) = (Vec::new(), 0);
    for chunk in chunks {
        let mut plan = StepPlan::default();
        plan.push_all_logits(SequenceId(1), start, &tokens[start..start + chunk], &blocks);
        all.extend(run(engine, &plan).logits);
        start += chunk;
    }
    all
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn cpu(source: &dyn WeightSource, quantize: Quantize, precision: Precision) -> CpuEngine {
    let kv_dtype = if precision == Precision::F32 { KvDtype::F32 } else { KvDtype::F16 };
    let config = CpuEngineConfig {
        num_blocks: NUM_BLOCKS,
        kv_dtype,
        quantize,
        precision,
        ..CpuEngineConfig::default()
    };
    CpuEngine::from_source(source, config).expect("a CPU engine").0
}

fn fixture(name: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(name);
    Model::open(&ModelSource::Folder(folder)).expect("a fixture")
}

#[test]
fn logits_are_those_of_the_weights_rounded_by_the_book() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let before = fake.counts();
    let tokens: Vec<u32> = (0..90).map(|i| 32 + (i * i * 29 + i * 5) % 95).collect();
    // The bound on rounding itself is relative to the largest logit.
    for (name, model) in [
        ("tiny", Model::tiny()),
        ("qwen2", fixture("qwen2")),
        ("llama-rope-llama3", fixture("llama-rope-llama3")),
    ] {
        let exact = logits(&mut cpu(&model, Quantize::None, Precision::F32), &tokens, &[90]);
        let want = logits(&mut cpu(&Rounded(&model), Quantize::None, Precision::F32), &tokens, &[90]);
        let theirs = logits(&mut cpu(&model, Quantize::Int8, Precision::Auto), &tokens, &[90]);
        let largest = exact.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
        for (kv_dtype, bound) in [(KvDtype::F16, F16_BOUND), (KvDtype::BF16, 8.0 * F16_BOUND)] {
            let config = CudaEngineConfig { kv_dtype, ..CONFIG };
            let mut engine = CudaEngine::from_source(&model, &config).expect("a CUDA engine").0;
            let got = logits(&mut engine, &tokens, &[90]);
            let (book, apart) = (farthest(&got, &want), farthest(&got, &exact));
            println!(
                "{name}, {kv_dtype}: {book} from the same weights in f32, {apart} from weights that are not rounded, {} from the CPU's 8 bits; logits up to {largest}",
                farthest(&got, &theirs)
            );
            assert!(book > 0.0 && book < bound, "{name}, {kv_dtype}: {book}");
            assert!(apart < bound + INT8_SHARE * largest, "{name}, {kv_dtype}: {apart} of {largest}");
        }
    }
    assert_eq!(fake.counts().held, before.held, "taken from the driver and not given back");
}

/// What rounding to 8 bits may move a logit by, as a share of the largest.
const INT8_SHARE: f32 = 0.05;

#[test]
fn bits_are_the_same_however_the_prompt_is_cut_and_whoever_is_beside_it() {
    let _turn = Turn::take();
    let Some(_fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let mut random = Random::from_env("cuda_int8_cuts");
    let tokens = random.tiny_prompt(100);
    let mut engine = CudaEngine::new(&Model::tiny(), &CONFIG).expect("a CUDA engine").0;
    let whole = bits(&logits(&mut engine, &tokens, &[100]));
    // Few rows, more than a few, and many go to different kernels.
    for chunks in [vec![1, 15, 16, 17, 51], vec![33, 64, 3], vec![99, 1]] {
        assert_eq!(bits(&logits(&mut engine, &tokens, &chunks)), whole, "chunks {chunks:?}");
    }
    // The last token beside a chunk of another prompt.
    let blocks: Vec<u32> = (0..NUM_BLOCKS as u32).rev().collect();
    let mut plan = StepPlan::default();
    plan.push_all_logits(SequenceId(2), 0, &random.tiny_prompt(50), &blocks[8..12]);
    plan.push_all_logits(SequenceId(1), 99, &tokens[99..], &blocks[..8]);
    let beside = bits(&run(&mut engine, &plan).logits);
    assert_eq!(beside[50 * engine.vocab_size()..], whole[99 * engine.vocab_size()..]);
    // And drawn from, by the graph too: the third step of this shape.
    let mut plan = StepPlan::default();
    let sampling = RowSampling { params: SamplingParams::GREEDY, sequence: 0, position: 100 };
    plan.push(SequenceId(1), 99, &tokens[99..], &blocks[..8], &[sampling]);
    let drawn: Vec<_> = (0..3).map(|_| run(&mut engine, &plan).sampled).collect();
    assert!(drawn[0].len() == 1 && drawn.iter().all(|sampled| *sampled == drawn[0]), "{drawn:?}");
}

#[test]
fn memory_is_halved_and_the_format_is_named() {
    let _turn = Turn::take();
    let Some(_fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let model = Model::tiny();
    let plan = |quantize| CudaPlan::new(&model, &CudaEngineConfig { quantize, ..CONFIG }).expect("a plan");
    let (half, int8) = (plan(Quantize::None), plan(Quantize::Int8));
    assert_eq!(int8.weight_format, "f32>int8-row");
    assert!(int8.layout.numerics_id.contains("-row8-k32x4/"), "{}", int8.layout.numerics_id);
    assert!(int8.layout.numerics_id.ends_with("f32>int8-row"), "{}", int8.layout.numerics_id);
    // Beside matrices there are the tables of the rotary embedding: in this model, made for 131,072 tokens, more than all of them.
    let c = &model.config;
    let others = c.context * c.head_dim * 4;
    let ratio = (int8.memory.weights_bytes - others) as f64 / (half.memory.weights_bytes - others) as f64;
    assert!((0.5..0.56).contains(&ratio), "{ratio}");
}

#[test]
fn an_element_that_is_not_finite_is_refused_by_name() {
    struct Spoilt(Model);
    impl WeightSource for Spoilt {
        fn config(&self) -> &ModelConfig {
            &self.0.config
        }
        fn digest(&self) -> [u8; 32] {
            self.0.digest
        }
        fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
            let mut tensor = WeightSource::tensor(&self.0, name)?;
            if name == "blk.1.ffn_up.weight" {
                let at = 4 * (3 * tensor.cols + 5);
                tensor.data.to_mut()[at..at + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
            }
            Ok(tensor)
        }
    }
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let before = fake.counts();
    let error = CudaEngine::from_source(&Spoilt(Model::tiny()), &CONFIG).err().expect("refused").to_string();
    assert_eq!(error, "tensor 'blk.1.ffn_up.weight': row 3 has an element that is not finite");
    assert_eq!(fake.counts().held, before.held);
}

/// Workers that keep 8 bits hand prompts to each other; who keeps 16 is refused, since bits would differ.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_with_8_bit_weights_hand_prompts_to_each_other() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let mut random = Random::from_env("cuda_int8_handoffs");
    let prompts: Vec<_> = [1, 33, 100].into_iter().map(|length| random.tiny_prompt(length)).collect();
    let device = strings(&["--device", "cuda:0"]);
    let config = ClusterConfig {
        kv_memory: "8M".into(),
        worker_args: strings(&["--context", "2048", "--quantize", "int8"]),
        prefill_args: device.clone(),
        decode_args: device,
        max_step_tokens: Some(64),
        env: vec![fake.env()],
        ..ClusterConfig::default()
    };
    let mut all = Vec::new();
    for (config, mode) in [(config.clone().colocated(), "colocated"), (config, "disaggregated")] {
        let cluster = Cluster::start(config).await;
        let mut answers = Vec::new();
        for prompt in &prompts {
            let completion = cluster.completion(&greedy(prompt, 12)).await;
            assert_eq!(completion.mode, mode);
            answers.push(completion.token_ids);
        }
        all.push(answers);
    }
    assert_eq!(all[0], all[1], "one numerics id, the same bits");
}
