//! A cluster and its load: given by hand, or drawn.

use baton_dispatch::{DoorLimits, Layout, Policy};

use crate::device::Device;
use crate::random::Random;

/// A cluster and its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Routers; at least 1.
    pub num_routers: usize,
    /// Prefill workers.
    pub num_prefill_workers: usize,
    /// Decode workers; at least 1.
    pub num_decode_workers: usize,
    /// Whether prefill has workers of its own.
    pub layout: Layout,
    /// How routers choose among workers.
    pub policy: Policy,
    /// Uncached prompt tokens that a decode worker computes itself, at most, while a prefill worker is ready.
    pub max_local_tokens: u32,
    /// A router's door.
    pub door: DoorLimits,
    /// What every worker is configured with.
    pub worker: WorkerShape,
    /// What workers run on.
    pub device: Device,
    /// What clients ask for.
    pub load: Load,
    /// Whether timers are short enough to run out.
    pub hasty: bool,
}

/// A worker's configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerShape {
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks of a prefill worker.
    pub prefill_blocks: usize,
    /// Blocks of a decode worker.
    pub decode_blocks: usize,
    /// Tokens of one step.
    pub max_step_tokens: usize,
    /// Prompt tokens of one step beside decoding sequences.
    pub local_prefill_tokens: usize,
    /// Expected milliseconds of a step with prompt tokens, at most.
    pub max_step_ms: f64,
    /// By what share of itself a decode step may grow for a newcomer's row; 0: rows are computed whole.
    pub max_step_growth: f64,
    /// Sequences with blocks.
    pub max_num_seqs: usize,
    /// Sequences that wait.
    pub max_queue: usize,
    /// Prompts open at once, and offered ahead, on a prefill worker.
    pub max_open_prompts: usize,
    /// Bytes of credit of a handoff, in bytes of simulated KV (8 a token and layer).
    pub credit_window: u64,
    /// Whether workers keep a prefix cache.
    pub cache: bool,
}

/// What clients ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Requests, over all routers.
    pub num_requests: usize,
    /// Mean time between two requests.
    pub interval_ms: u64,
    /// Tokens of the shortest and the longest prompt.
    pub prompt_tokens: (usize, usize),
    /// Least and most tokens that a request asks for; at least 1.
    pub new_tokens: (u32, u32),
    /// How many requests in a thousand ask for an eighth of that at most.
    pub short_per_mille: u64,
    /// Beginnings that prompts share.
    pub num_prefixes: usize,
    /// Tokens of a shared beginning; 0: any number.
    pub prefix_tokens: usize,
    /// How many requests in a thousand have a shared beginning.
    pub shared_per_mille: u64,
    /// Sequences of a request, at most.
    pub max_sequences: u32,
    /// Whether some requests have a priority, stop tokens, stop strings, a single token, or stay out of the prefix cache.
    pub varied: bool,
}

impl Shape {
    /// Tokens of prompt and output together, as configured on the workers.
    pub const fn context(&self) -> usize {
        self.load.prompt_tokens.1 + self.load.new_tokens.1 as usize + 1
    }

    /// Workers of both kinds; prefill workers come first.
    pub const fn num_workers(&self) -> usize {
        self.num_prefill_workers + self.num_decode_workers
    }

    /// Llama 3 8B on four H200s, two of each kind: 200 requests of 2,048 prompt tokens and 128 output tokens, 20 a second.
    pub const fn llama_on_h200() -> Self {
        Self {
            num_routers: 1,
            num_prefill_workers: 2,
            num_decode_workers: 2,
            layout: Layout::Disaggregated,
            policy: Policy::KvAware,
            max_local_tokens: 256,
            door: DoorLimits { max_concurrent: 1_024, max_queue: 1_024 },
            worker: WorkerShape {
                block_size: 16,
                prefill_blocks: 8_192,
                decode_blocks: 16_384,
                max_step_tokens: 2_048,
                local_prefill_tokens: 256,
                max_step_ms: 100.0,
                max_step_growth: 0.0,
                max_num_seqs: 256,
                max_queue: 1_024,
                max_open_prompts: 4,
                credit_window: 1 << 20,
                cache: false,
            },
            device: Device::LLAMA_ON_H200,
            load: Load {
                num_requests: 200,
                interval_ms: 50,
                prompt_tokens: (2_048, 2_048),
                new_tokens: (128, 128),
                short_per_mille: 0,
                num_prefixes: 0,
                prefix_tokens: 0,
                shared_per_mille: 0,
                max_sequences: 1,
                varied: false,
            },
            hasty: false,
        }
    }

    /// A small cluster under a load that fills it, so that everything that can go wrong does.
    pub(crate) fn draw(random: &mut Random) -> Self {
        // Many requests at once, with outputs longer than admission foresees: sequences are preempted.
        let crowded = random.chance(200);
        let block_size = [1, 2, 4, 8][random.index(4)];
        let max_prompt = random.between(4..=80) as usize;
        let longest_output = if crowded || random.chance(300) { 200 } else { 40 };
        let max_new_tokens = random.between(1..=longest_output) as u32;
        // From room for one request to room for many.
        let longest = (max_prompt + max_new_tokens as usize + 1).div_ceil(block_size);
        let blocks = |random: &mut Random| {
            let more = if crowded || random.chance(500) { 1 } else { 6 };
            longest + random.index(longest * more)
        };
        let policies = [Policy::LeastLoaded, Policy::RoundRobin, Policy::RandomOfTwo];
        Self {
            num_routers: random.between(1..=2) as usize,
            num_prefill_workers: random.between(0..=3) as usize,
            num_decode_workers: random.between(1..=3) as usize,
            layout: if random.chance(60) { Layout::Colocated } else { Layout::Disaggregated },
            policy: if random.chance(600) { Policy::KvAware } else { policies[random.index(3)] },
            max_local_tokens: [0, 0, 16, 256][random.index(4)],
            door: DoorLimits { max_concurrent: if crowded { 24 } else { 8 }, max_queue: 8 },
            worker: WorkerShape {
                block_size,
                prefill_blocks: blocks(random),
                decode_blocks: blocks(random),
                max_step_tokens: block_size * random.between(1..=8) as usize,
                local_prefill_tokens: block_size,
                max_step_ms: [50.0, 3.0][random.index(2)],
                // However little a context costs, it is too much.
                max_step_growth: if block_size == 8 { 0.0 } else { 1e-9 },
                max_num_seqs: if crowded { 16 } else { 8 },
                max_queue: 16,
                max_open_prompts: 2,
                credit_window: random.between(1..=40) * (block_size as u64) * 8,
                cache: random.chance(600),
            },
            device: Self::draw_device(random),
            load: Load {
                num_requests: random.between(if crowded { 30..=60 } else { 2..=24 }) as usize,
                interval_ms: if crowded { 10 } else { [1, 20, 200][random.index(3)] },
                prompt_tokens: (1, max_prompt),
                new_tokens: (1, max_new_tokens),
                short_per_mille: [0, if crowded { 900 } else { 500 }][random.index(2)],
                num_prefixes: random.between(1..=3) as usize,
                prefix_tokens: 0,
                shared_per_mille: 500,
                max_sequences: if random.chance(600) { 4 } else { 1 },
                varied: true,
            },
            hasty: random.chance(300),
        }
    }

    /// From a link on which transfers are hidden to one on which they are much longer than prefills.
    fn draw_device(random: &mut Random) -> Device {
        let slow = Device::SMOLLM2_ON_CPU;
        Device {
            link_bytes_per_s: [1e9, 1e8, 1e7][random.index(3)],
            latency_us: (100, 1_500),
            ..[slow, Device::LLAMA_ON_A100, slow, slow][random.index(4)]
        }
    }
}
