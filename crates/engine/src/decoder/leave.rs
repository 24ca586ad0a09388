//! Leaving a step within a layer.
//!
//! Member 0 asks, the others follow what it was told. From then on members pass over the work of the layer, but they still meet at each
//! of its barriers; that the step is over is settled at the last of them, where all see it. What was passed over is read
//! by nobody but the rest of this layer, which counts for nothing, and no KV is written from it: whoever
//! skipped something that KV is made of did so before the barrier ahead of the writing.

use std::sync::atomic::{AtomicBool, Ordering};

use baton_scheduler::{Flow, StepPoint};

/// Told where a step is; says whether it goes on.
pub(crate) type OnPoint<'a> = &'a mut dyn FnMut(StepPoint) -> Flow;

/// What all members of a step see.
#[derive(Default)]
pub(super) struct Leaving {
    /// The rest of the layer is not wanted.
    asked: AtomicBool,
    /// The step ended with a layer; set before that layer's last barrier only.
    stopped: AtomicBool,
}

impl Leaving {
    pub(super) fn start(&self) {
        self.asked.store(false, Ordering::Relaxed);
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// To be asked after a layer's last barrier.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// One member's view.
pub(super) struct Watch<'a> {
    leaving: &'a Leaving,
    /// Member 0 has it.
    on_point: Option<OnPoint<'a>>,
}

impl<'a> Watch<'a> {
    pub(super) fn new(leaving: &'a Leaving, on_point: Option<OnPoint<'a>>) -> Self {
        Self { leaving, on_point }
    }

    /// Whether the rest of this layer is not wanted. Asked between pieces of work of a few milliseconds at most.
    pub(super) fn leaves(&mut self) -> bool {
        let asked = &self.leaving.asked;
        if asked.load(Ordering::Relaxed) {
            return true;
        }
        let Some(on_point) = &mut self.on_point else { return false };
        let leaves = on_point(StepPoint::Within) == Flow::Stop;
        if leaves {
            asked.store(true, Ordering::Relaxed);
        }
        leaves
    }

    /// This member did its part of a layer, or passed it over; a barrier follows.
    pub(super) fn layer_end(&mut self, layer: usize) {
        if let Some(on_point) = &mut self.on_point {
            let left = self.leaving.asked.load(Ordering::Relaxed);
            if left || on_point(StepPoint::LayerEnd(layer)) == Flow::Stop {
                self.leaving.stopped.store(true, Ordering::Relaxed);
            }
        }
    }
}
