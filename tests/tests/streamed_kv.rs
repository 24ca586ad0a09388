//! KV computed by one engine and moved to another: decoding from it gives the same bits, and one value altered after
//! it arrived gives others. So what D attends to is what arrived, all of it, and nothing else.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_engine::{Arena, CpuEngine, CpuEngineConfig};
use baton_kv::{BlockMemory, BlockPool, BlockSlice, BlockTable, KvDtype};
use baton_model::Model;
use baton_scheduler::{Engine, Flow, SequenceId, StepOutput, StepPlan};
use baton_tests::seed::Random;

const NUM_BLOCKS: usize = 16;
const NUM_ALTERED: usize = 400;
const PROMPT: usize = 16 * 5 + 7;

struct Side {
    engine: CpuEngine,
    memory: Arc<Arena>,
    table: BlockTable,
}

impl Side {
    /// An engine of the tiny model with blocks for `PROMPT` tokens and some more; `skip` makes its block ids differ from another's.
    fn new(kv_dtype: KvDtype, skip: usize) -> Self {
        let config = CpuEngineConfig { num_blocks: NUM_BLOCKS, kv_dtype, ..CpuEngineConfig::default() };
        let (engine, memory) = CpuEngine::new(&Model::tiny(), config).expect("an engine");
        let pool = BlockPool::new(NUM_BLOCKS);
        let skipped = pool.allocate(skip).expect("blocks");
        let mut table = BlockTable::new();
        table.extend(pool.allocate((PROMPT + 16).div_ceil(16)).expect("blocks"));
        drop(skipped);
        Self { engine, memory, table }
    }

    /// Computes tokens from `position` on and returns the bits of the last one's logits.
    fn step(&mut self, position: usize, tokens: &[u32]) -> Vec<u32> {
        let mut plan = StepPlan::default();
        let blocks = (position + tokens.len()).div_ceil(16);
        plan.push_all_logits(SequenceId(1), position, tokens, &self.table.ids()[..blocks]);
        let mut output = StepOutput::default();
        self.engine.step(&plan, &mut output, &mut |_| Flow::Continue).expect("a step");
        let vocab = self.engine.vocab_size();
        assert_eq!(output.logits.len(), tokens.len() * vocab);
        output.logits[output.logits.len() - vocab..].iter().map(|logit| logit.to_bits()).collect()
    }

    /// Takes over the prompt's KV as the wire carries it: whole blocks raw, the last one's tokens in canonical order.
    fn receive(&mut self, from: &Self) {
        let (read, write) = (from.table.read_lease(), self.table.write_lease(0).expect("owned blocks"));
        for layer in 0..self.memory.layout().num_layers {
            for nth in 0..PROMPT / 16 {
                let bytes = from.memory.read(&read, layer, nth).expect("a block");
                self.memory.write(&write, layer, nth, bytes).expect("written");
            }
            let tail = BlockSlice { layer, nth: PROMPT / 16, num_tokens: PROMPT % 16 };
            let mut bytes = Vec::new();
            from.memory.gather(&read, tail, &mut bytes).expect("a tail");
            self.memory.scatter(&write, tail, &bytes).expect("written");
        }
    }

    /// Changes one value of K or V among the prompt's; `xor` is applied to one byte. Applied twice it changes nothing.
    fn alter(&self, at: BlockSlice, byte: usize, xor: u8) {
        let mut bytes = Vec::new();
        self.memory.gather(&self.table.read_lease(), at, &mut bytes).expect("tokens");
        bytes[byte] ^= xor;
        let write = self.table.write_lease(0).expect("owned blocks");
        self.memory.scatter(&write, at, &bytes).expect("written");
    }
}

fn check(kv_dtype: KvDtype) {
    let mut random = Random::from_env("streamed_kv");
    let prompt = random.tiny_prompt(PROMPT);
    let mut source = Side::new(kv_dtype, 0);
    let mut destination = Side::new(kv_dtype, 3);
    source.step(0, &prompt);
    destination.receive(&source);

    let token = [prompt[0]];
    let wanted = source.step(PROMPT, &token);
    assert!(
        destination.step(PROMPT, &token) == wanted,
        "decoding from moved KV parts from decoding where it was made"
    );

    let layout = destination.memory.layout().clone();
    let per_token = layout.token_bytes() / layout.num_layers;
    // A token that attention looks at with a weight below f32's resolution changes nothing, so not every single value
    // shows; nearly all do, and in each layer both of K and V.
    let mut num_shown = BTreeMap::new();
    for _ in 0..NUM_ALTERED {
        let nth = random.within(0..PROMPT.div_ceil(16));
        let num_tokens = if nth == PROMPT / 16 { PROMPT % 16 } else { 16 };
        let at = BlockSlice { layer: random.within(0..layout.num_layers), nth, num_tokens };
        // The byte with sign and exponent; its lowest bits are the mantissa's highest or the exponent's lowest.
        let num_values = num_tokens * per_token / kv_dtype.size();
        let value = random.within(0..num_values);
        let byte = value * kv_dtype.size() + kv_dtype.size() - 1;
        destination.alter(at, byte, 0x02);
        let shown = destination.step(PROMPT, &token) != wanted;
        *num_shown.entry((at.layer, value < num_values / 2)).or_insert(0) += usize::from(shown);
        destination.alter(at, byte, 0x02);
        assert!(destination.step(PROMPT, &token) == wanted, "{at:?}: value {value} put back");
    }
    eprintln!(
        "{kv_dtype}: altered values that showed, by layer and whether of K: {num_shown:?} of {NUM_ALTERED}"
    );
    assert!(num_shown.values().sum::<usize>() > NUM_ALTERED * 3 / 4, "{num_shown:?}");
    assert!(
        num_shown.len() == 2 * layout.num_layers && num_shown.values().all(|&num| num > 0),
        "{num_shown:?}"
    );
}

#[test]
fn decoding_reads_exactly_the_kv_that_arrived_in_f16() {
    check(KvDtype::F16);
}

#[test]
fn decoding_reads_exactly_the_kv_that_arrived_in_f32() {
    check(KvDtype::F32);
}

#[test]
fn decoding_reads_exactly_the_kv_that_arrived_in_bf16() {
    check(KvDtype::BF16);
}

#[test]
fn decoding_reads_exactly_the_kv_that_arrived_in_fp8() {
    check(KvDtype::Fp8);
}
