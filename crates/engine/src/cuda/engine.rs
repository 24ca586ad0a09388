//! The CUDA engine: from a step plan to its output.
//!
//! The step thread queues layers ahead of the device and hears of each layer's end when the device is there: so it is told the truth,
//! a step can be left within a few layers, and the device is never idle for the telling.

use std::sync::Arc;

use baton_kv::{BlockMemory, KvLayout};
use baton_model::Model;
use baton_scheduler::{Engine, EngineError, Flow, Sampled, StepOutput, StepPlan, StepPoint};

use super::arena::CudaArena;
use super::config::{self, CudaEngineConfig};
use super::driver::{Device, DeviceError, Event, Memory, Pinned, Stream};
use super::forward::Forward;
use super::kernels::{Dims, Kernels};
use super::products::Products;
use super::scratch::{DECODE_CAPACITY, LOGIT_ROWS, Scratch};
use super::tables::{LogitGroup, Shape, Tables, Upload};
use super::weights::DeviceWeights;
use crate::batch::{Batch, Bounds, Purpose};
use crate::error::EngineBuildError;
use crate::source::WeightSource;

/// Layers that are queued behind the one whose end is waited for.
const LAYERS_AHEAD: usize = 2;
/// What the sampler says of logits that are not finite.
const NOT_FINITE: u32 = u32::MAX;

/// Computes steps on one CUDA device. All work is queued by the thread that calls [`Engine::step`], on one stream.
pub struct CudaEngine {
    // First: it is finished before what it uses is given back.
    compute: Stream,
    layer_ends: Vec<Event>,
    forward: Forward,
    tables: Tables,
    upload: Upload,
    results: Results,
    arena: Arc<CudaArena>,
    batch: Batch,
    bounds: Bounds,
    shape: Shape,
    device: Arc<Device>,
}

/// Drawn tokens and copied logits, on their way back.
struct Results {
    /// Tokens, then log-probabilities, of all the step's samplings.
    drawn: Memory,
    drawn_host: Pinned,
    num_drawn: usize,
    logits_host: Pinned,
}

impl Results {
    fn new(device: &Arc<Device>, num_drawn: usize, vocab: usize) -> Result<Results, DeviceError> {
        Ok(Results {
            drawn: Memory::new(device, 8 * num_drawn)?,
            drawn_host: Pinned::new(device, 8 * num_drawn)?,
            num_drawn,
            logits_host: Pinned::new(device, 4 * LOGIT_ROWS * vocab)?,
        })
    }
}

impl CudaEngine {
    /// Opens the device, uploads the weights, takes arena and scratch.
    ///
    /// # Errors
    /// [`EngineBuildError`]: a setting out of bounds, no such device, a model that the engine can't run, no memory.
    pub fn new(
        model: &Model,
        config: &CudaEngineConfig,
    ) -> Result<(CudaEngine, Arc<CudaArena>), EngineBuildError> {
        Self::from_source(model, config)
    }

    /// As [`Self::new`], from any source of weights.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_source(
        source: &dyn WeightSource,
        config: &CudaEngineConfig,
    ) -> Result<(CudaEngine, Arc<CudaArena>), EngineBuildError> {
        let config::Checked { half, plan } = config::check(source, config)?;
        let model = source.config();
        let device = Device::open(config.ordinal)?;
        let products = Products::new(&device, half)?;
        let kernels = Kernels::load(&device, half, Dims::new(model, &plan.layout))?;
        let weights = DeviceWeights::load(source, &device, &products, half)?;
        let arena = Arc::new(CudaArena::new(&device, plan.layout, config.num_blocks)?);
        let scratch = Scratch::new(&device, model, config.max_step_tokens)?;
        let group = model.num_heads / model.num_kv_heads;
        let item_bytes = model.num_kv_heads * DECODE_CAPACITY * (model.head_dim + 2) * 4;
        let shape = Shape {
            group,
            block_size: config.block_size,
            max_decode_items: scratch.partials.len / item_bytes,
        };
        let bounds = Bounds {
            num_blocks: config.num_blocks,
            vocab: model.vocab,
            context: model.context,
            max_step_tokens: config.max_step_tokens,
            group,
        };
        let engine = CudaEngine {
            compute: Stream::new(&device)?,
            layer_ends: (0..=LAYERS_AHEAD).map(|_| Event::new(&device)).collect::<Result<_, _>>()?,
            results: Results::new(&device, config.max_step_tokens.max(LOGIT_ROWS), model.vocab)?,
            upload: Upload::new(&device)?,
            forward: Forward { kernels, products, weights, scratch, arena: Arc::clone(&arena) },
            tables: Tables::default(),
            batch: Batch::new(&bounds),
            arena: Arc::clone(&arena),
            bounds,
            shape,
            device,
        };
        Ok((engine, arena))
    }

    fn copy_blocks(&self) -> Result<(), DeviceError> {
        let num_blocks = self.bounds.num_blocks as u32;
        for pairs in &self.tables.copies {
            let pairs = self.upload.span(pairs.clone());
            self.forward.kernels.copy_blocks(&self.compute, self.arena.all(), pairs, num_blocks)?;
        }
        Ok(())
    }

    /// Computes what the tables say; false if it was left early. The stream is finished in either case, as far as the device lets it.
    fn run(
        &mut self,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<bool, DeviceError> {
        self.forward.embed(&self.compute, &self.upload, &self.tables)?;
        let num_layers = self.forward.weights.layers.len();
        let ring = self.layer_ends.len();
        for n in 0..num_layers {
            self.forward.keys_and_values(&self.compute, &self.upload, &self.tables, n)?;
            self.compute.record(&self.layer_ends[n % ring])?;
            self.forward.rest_of_layer(&self.compute, &self.upload, &self.tables, n)?;
            if n >= LAYERS_AHEAD && !self.layer_ended(n - LAYERS_AHEAD, on_point)? {
                return Ok(false);
            }
        }
        // What is asked of all layers is queued before the last ends are waited for, unless copies of logits wait for it anyway.
        if self.batch.num_copied == 0 {
            self.logits(output)?;
        }
        for n in num_layers.saturating_sub(LAYERS_AHEAD)..num_layers {
            if !self.layer_ended(n, on_point)? {
                return Ok(false);
            }
        }
        if self.batch.num_copied > 0 {
            self.logits(output)?;
        }
        Ok(true)
    }

    fn layer_ended(
        &self,
        n: usize,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<bool, DeviceError> {
        self.layer_ends[n % self.layer_ends.len()].synchronize()?;
        Ok(on_point(StepPoint::LayerEnd(n)) == Flow::Continue)
    }

    /// Queues logits, drawing, and the way back of what was drawn; copied logits are waited for, some rows at a time.
    fn logits(&mut self, output: &mut StepOutput) -> Result<(), DeviceError> {
        let vocab = self.bounds.vocab;
        let num = self.tables.groups.last().map_or(0, |group| group.samplings.end);
        if num > self.results.num_drawn {
            self.results = Results::new(&self.device, num.next_power_of_two(), vocab)?;
        }
        for group in &self.tables.groups {
            self.forward.logits(&self.compute, &self.upload, &self.tables, group)?;
            self.draw(group, num)?;
            if self.batch.num_copied > 0 {
                self.copy_logits(group, output)?;
            }
        }
        if num > 0 {
            // SAFETY: nobody looks at the host's side before the stream is finished.
            unsafe {
                let host = self.results.drawn_host.get_mut(0, 8 * num);
                self.compute.download(self.results.drawn.at(0, 8 * num), host)?;
            }
        }
        Ok(())
    }

    fn draw(&self, group: &LogitGroup, num: usize) -> Result<(), DeviceError> {
        for first in group.samplings.clone().step_by(LOGIT_ROWS) {
            let samplings = first..group.samplings.end.min(first + LOGIT_ROWS);
            let drawn = &self.results.drawn;
            let tokens = drawn.at(4 * first, 4 * samplings.len());
            let logprobs = drawn.at(4 * (num + first), 4 * samplings.len());
            let samplings = self.upload.samplings(&self.tables, samplings);
            self.forward.sample(&self.compute, samplings, tokens, logprobs)?;
        }
        Ok(())
    }

    fn copy_logits(&self, group: &LogitGroup, output: &mut StepOutput) -> Result<(), DeviceError> {
        let row_bytes = 4 * self.bounds.vocab;
        let len = group.wanted.len() * row_bytes;
        // SAFETY: the stream is finished before anybody looks, and before the next group is copied.
        let host = unsafe { self.results.logits_host.get_mut(0, len) };
        // SAFETY: as above.
        unsafe { self.compute.download(self.forward.scratch.logits.part(0, len), host) }?;
        self.compute.synchronize()?;
        for (wanted, row) in self.batch.wanted[group.wanted.clone()].iter().zip(host.chunks_exact(row_bytes))
        {
            let Purpose::Copy { nth } = wanted.purpose else { continue };
            let out = &mut output.logits[nth * self.bounds.vocab..][..self.bounds.vocab];
            for (out, bytes) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }

    /// What was drawn, in the order of the samplings.
    fn fill(&self, output: &mut StepOutput) -> Result<(), EngineError> {
        let not_finite = || EngineError::Fatal("logits are not finite".to_owned());
        if output.logits.iter().any(|logit| !logit.is_finite()) {
            return Err(not_finite());
        }
        let num = self.tables.groups.last().map_or(0, |group| group.samplings.end);
        // SAFETY: the stream is finished.
        let (words, _) = unsafe { self.results.drawn_host.get(0, 8 * num) }.as_chunks::<4>();
        let (tokens, logprobs) = words.split_at(num);
        let mut drawn = tokens.iter().zip(logprobs);
        for wanted in &self.batch.wanted {
            let Purpose::Sample { row, samplings } = &wanted.purpose else { continue };
            for (nth, (token, logprob)) in samplings.clone().zip(&mut drawn) {
                let (token, logprob) = (u32::from_le_bytes(*token), f32::from_le_bytes(*logprob));
                if token == NOT_FINITE {
                    return Err(not_finite());
                }
                output.sampled.push(Sampled { row: *row, sampling: nth as u32, token, logprob });
            }
        }
        Ok(())
    }
}

fn fatal(error: DeviceError) -> EngineError {
    EngineError::Fatal(error.to_string())
}

impl Engine for CudaEngine {
    fn layout(&self) -> &KvLayout {
        self.arena.layout()
    }

    fn max_step_tokens(&self) -> usize {
        self.bounds.max_step_tokens
    }

    fn vocab_size(&self) -> usize {
        self.bounds.vocab
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<(), EngineError> {
        output.sampled.clear();
        output.logits.clear();
        output.stopped = false;
        self.batch.prepare(plan, self.arena.layout(), &self.bounds).map_err(EngineError::BadPlan)?;
        self.device.bind().map_err(fatal)?;
        self.tables.build(plan, &self.batch, self.shape);
        self.upload.send(&self.tables, &self.compute).map_err(fatal)?;
        // KV that arrived is there before anything reads it.
        self.compute.wait(self.arena.written()).map_err(fatal)?;
        self.copy_blocks().map_err(fatal)?;
        if plan.is_empty() {
            return self.compute.synchronize().map_err(fatal);
        }
        output.logits.resize(self.batch.num_copied * self.bounds.vocab, 0.0);
        let whole = self.run(output, on_point);
        self.compute.synchronize().map_err(fatal)?;
        if !whole.map_err(fatal)? {
            output.stopped = true;
            output.logits.clear();
            return Ok(());
        }
        self.fill(output)
    }
}
