//! The CUDA engine: from a step plan to its output.
//!
//! The step thread queues layers ahead of the device and hears of each layer's end when the device is there: so it is told the truth,
//! a step can be left within a few layers, and the device is never idle for the telling. Steps that only decode are launched as one graph, and
//! told of at their end.

use std::sync::Arc;

use baton_kv::{BlockMemory, KvLayout};
use baton_model::Model;
use baton_scheduler::{Engine, EngineError, Flow, Sampled, StepOutput, StepPlan, StepPoint};

use super::arena::CudaArena;
use super::config::{self, CudaEngineConfig};
use super::drawn::{Drawn, DrawnToken};
use super::driver::{Device, DeviceError, Event, Pinned, Stream};
use super::forward::{Forward, Step};
use super::graphs::Graphs;
use super::kernels::{Dims, Kernels};
use super::padded::Padded;
use super::products::Products;
use super::scratch::{self, DECODE_CAPACITY, LOGIT_ROWS, Scratch};
use super::tables::{LogitGroup, Shape, Tables, Upload};
use super::weights::{DeviceWeights, Kept};
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
    graphs: Option<Graphs>,
    forward: Forward,
    tables: Tables,
    upload: Upload,
    drawn: Drawn,
    logits_host: Pinned,
    arena: Arc<CudaArena>,
    batch: Batch,
    bounds: Bounds,
    shape: Shape,
    device: Arc<Device>,
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
        let kept = Kept { half, quantize: config.quantize };
        let weights = DeviceWeights::load(source, &device, &products, kept)?;
        let arena = Arc::new(CudaArena::new(&device, plan.layout, config.num_blocks)?);
        let scratch = Scratch::new(&device, model, config.max_step_tokens)?;
        let group = model.num_heads / model.num_kv_heads;
        let shape = Shape {
            group,
            block_size: config.block_size,
            max_decode_items: scratch::max_items(model, DECODE_CAPACITY),
            max_padded_items: scratch::max_items(model, group),
        };
        let bounds = Bounds {
            num_blocks: config.num_blocks,
            vocab: model.vocab,
            context: model.context,
            max_step_tokens: config.max_step_tokens,
            num_layers: model.num_layers,
            group,
        };
        let engine = CudaEngine {
            compute: Stream::new(&device)?,
            layer_ends: (0..=LAYERS_AHEAD).map(|_| Event::new(&device)).collect::<Result<_, _>>()?,
            graphs: config.graphs.then(|| Graphs::new(&device, shape.max_padded_items)).transpose()?,
            drawn: Drawn::new(&device, config.max_step_tokens.max(LOGIT_ROWS))?,
            logits_host: Pinned::new(&device, 4 * LOGIT_ROWS * model.vocab)?,
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

    /// The graph's shape, if this plan is launched as one.
    fn padded(&mut self, plan: &StepPlan) -> Option<Padded> {
        let graphs = self.graphs.as_mut()?;
        let padded = Padded::of(plan, self.shape, self.bounds.max_step_tokens)?;
        graphs.takes(padded).then_some(padded)
    }

    /// Computes a step as a graph, up to where the stream is finished.
    fn run_graph(&mut self, plan: &StepPlan, padded: Padded) -> Result<(), DeviceError> {
        let Self { compute, graphs: Some(graphs), forward, batch, arena, .. } = self else { return Ok(()) };
        graphs.tables.build_padded(plan, batch, self.shape, padded);
        graphs.upload.send(&graphs.tables, compute)?;
        compute.wait(arena.written())?;
        let step = Step { stream: compute, upload: &graphs.upload, tables: &graphs.tables };
        forward.copy_blocks(step, self.bounds.num_blocks as u32)?;
        graphs.launch(compute, forward, padded)?;
        graphs.drawn.download(compute, padded.rows)
    }

    /// Computes what the tables say; false if it was left early. The stream is finished in either case, as far as the device lets it.
    fn run(
        &mut self,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<bool, DeviceError> {
        let Self { compute, forward, tables, upload, layer_ends, .. } = self;
        let step = Step { stream: compute, upload, tables };
        forward.embed(step)?;
        let num_layers = forward.weights.layers.len();
        for n in 0..num_layers {
            forward.keys_and_values(step, n)?;
            compute.record(&layer_ends[n % layer_ends.len()])?;
            forward.rest_of_layer(step, n)?;
            if n >= LAYERS_AHEAD && !layer_ended(layer_ends, n - LAYERS_AHEAD, on_point)? {
                return Ok(false);
            }
        }
        // What is asked of all layers is queued before the last ends are waited for, unless copies of logits wait for it anyway.
        if self.batch.num_copied == 0 {
            self.logits(output)?;
        }
        for n in num_layers.saturating_sub(LAYERS_AHEAD)..num_layers {
            if !layer_ended(&self.layer_ends, n, on_point)? {
                return Ok(false);
            }
        }
        if self.batch.num_copied > 0 {
            self.logits(output)?;
        }
        Ok(true)
    }

    /// Queues logits, drawing, and the way back of what was drawn; copied logits are waited for, some rows at a time.
    fn logits(&mut self, output: &mut StepOutput) -> Result<(), DeviceError> {
        let num = self.tables.num_samplings();
        if num > self.drawn.room() {
            self.drawn = Drawn::new(&self.device, num.next_power_of_two())?;
        }
        for nth in 0..self.tables.groups.len() {
            let step = Step { stream: &self.compute, upload: &self.upload, tables: &self.tables };
            let group = &self.tables.groups[nth];
            self.forward.logits(step, group)?;
            self.forward.draw(step, group, &self.drawn)?;
            if self.batch.num_copied > 0 {
                self.copy_logits(group, output)?;
            }
        }
        self.drawn.download(&self.compute, num)
    }

    fn copy_logits(&self, group: &LogitGroup, output: &mut StepOutput) -> Result<(), DeviceError> {
        let row_bytes = 4 * self.bounds.vocab;
        let len = group.wanted.len() * row_bytes;
        // SAFETY: the stream is finished before anybody looks, and before the next group is copied.
        let host = unsafe { self.logits_host.get_mut(0, len) };
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

    /// What was drawn, in the order of the samplings: the first of `num` that were downloaded from `drawn`.
    fn fill(&self, output: &mut StepOutput, drawn: &Drawn, num: usize) -> Result<(), EngineError> {
        let not_finite = || EngineError::Fatal("logits are not finite".to_owned());
        if output.logits.iter().any(|logit| !logit.is_finite()) {
            return Err(not_finite());
        }
        // SAFETY: the stream is finished.
        let mut drawn = unsafe { drawn.tokens(num) };
        for wanted in &self.batch.wanted {
            let Purpose::Sample { row, samplings } = &wanted.purpose else { continue };
            for (nth, DrawnToken { token, logprob }) in samplings.clone().zip(&mut drawn) {
                if token == NOT_FINITE {
                    return Err(not_finite());
                }
                output.sampled.push(Sampled { row: *row, sampling: nth as u32, token, logprob });
            }
        }
        Ok(())
    }
}

/// Waits for a layer's end and tells of it; false if the step is to be left.
fn layer_ended(
    layer_ends: &[Event],
    n: usize,
    on_point: &mut dyn FnMut(StepPoint) -> Flow,
) -> Result<bool, DeviceError> {
    layer_ends[n % layer_ends.len()].synchronize()?;
    Ok(on_point(StepPoint::LayerEnd(n)) == Flow::Continue)
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
        if plan.part.is_some() {
            return Err(EngineError::BadPlan(
                "a row in parts, on a device that computes whole rows".to_owned(),
            ));
        }
        self.batch.prepare(plan, self.arena.layout(), &self.bounds).map_err(EngineError::BadPlan)?;
        self.device.bind().map_err(fatal)?;
        if let Some(padded) = self.padded(plan) {
            let queued = self.run_graph(plan, padded);
            self.compute.synchronize().and(queued).map_err(fatal)?;
            // All layers have ended by now.
            let num_layers = self.forward.weights.layers.len();
            if (0..num_layers).any(|n| on_point(StepPoint::LayerEnd(n)) == Flow::Stop) {
                output.stopped = true;
                return Ok(());
            }
            return match &self.graphs {
                Some(graphs) => self.fill(output, &graphs.drawn, padded.rows),
                None => Ok(()),
            };
        }
        self.tables.build(plan, &self.batch, self.shape);
        self.upload.send(&self.tables, &self.compute).map_err(fatal)?;
        // KV that arrived is there before anything reads it.
        self.compute.wait(self.arena.written()).map_err(fatal)?;
        let step = Step { stream: &self.compute, upload: &self.upload, tables: &self.tables };
        self.forward.copy_blocks(step, self.bounds.num_blocks as u32).map_err(fatal)?;
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
        self.fill(output, &self.drawn, self.tables.num_samplings())
    }
}
