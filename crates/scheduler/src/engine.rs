//! What the step loop asks of a model executor.

use baton_kv::KvLayout;

use crate::plan::StepPlan;

/// How far a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPoint {
    /// Somewhere in a layer: nothing is complete that was not before. Comes every few milliseconds at most, so that a long layer
    /// can be left.
    Within,
    /// This layer's K and V of the step are complete in block memory.
    LayerEnd(usize),
}

/// Whether a step goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Compute on.
    Continue,
    /// Leave the step now; nothing of it counts but its block copies, its KV is written again when the tokens are planned again.
    Stop,
}

/// One sampled token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// Index into [`StepPlan::rows`].
    pub row: u32,
    /// Index into [`StepPlan::samplings`].
    pub sampling: u32,
    /// Token id.
    pub token: u32,
    /// Natural logarithm of its probability, before temperature and truncation.
    pub logprob: f32,
}

/// What a step produced.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One entry for each of [`StepPlan::samplings`]: in row order, within a row in the order of its samplings. Cleared
    /// by the engine first.
    pub sampled: Vec<Sampled>,
    /// The step was left early because `on_point` said [`Flow::Stop`].
    pub stopped: bool,
    /// For rows with [`crate::Logits::All`]: `tokens x vocab` floats a row, in row order; otherwise empty.
    pub logits: Vec<f32>,
}

/// Why a step could not be done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The plan contradicts the layout or the arena: a bug of the planner; the worker stops.
    #[error("step plan refused: {0}")]
    BadPlan(String),
    /// The device failed; the worker stops.
    #[error("engine failed: {0}")]
    Fatal(String),
}

/// A model executor: synchronous, owned by one step loop.
///
/// Same tokens however the work is cut: the logits of a row are the same bits whatever other rows the plan
/// holds, however its prompt was chunked, on however many threads, in whichever blocks, and whether
/// its prefix was computed here or arrived.
pub trait Engine: Send {
    /// How this engine lays out KV.
    fn layout(&self) -> &KvLayout;

    /// Largest number of tokens that one plan may hold.
    fn max_step_tokens(&self) -> usize;

    /// Size of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Whether it takes plans with a [`crate::RowPart`]. It then keeps what a row in parts is at between two steps, of one row; a step that is left, or one
    /// without that row, changes nothing of it.
    fn splits_rows(&self) -> bool {
        false
    }

    /// Computes one step: performs `plan.copies` before anything else, embeds all tokens, writes their K and V into their blocks, attends
    /// over them, and samples where asked. `on_point` is called on the calling thread: with each layer's end in order, and in between as
    /// often as the engine can leave the step. A layer that is left has no end.
    ///
    /// # Errors
    /// [`EngineError`]; the engine must not be used again after [`EngineError::Fatal`].
    fn step(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<(), EngineError>;
}

impl<E: Engine + ?Sized> Engine for Box<E> {
    fn layout(&self) -> &KvLayout {
        (**self).layout()
    }

    fn max_step_tokens(&self) -> usize {
        (**self).max_step_tokens()
    }

    fn vocab_size(&self) -> usize {
        (**self).vocab_size()
    }

    fn splits_rows(&self) -> bool {
        (**self).splits_rows()
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<(), EngineError> {
        (**self).step(plan, output, on_point)
    }
}
