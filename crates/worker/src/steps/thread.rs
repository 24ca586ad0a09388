//! The step loop's thread: starting it, building the engine on it, ending it.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use baton_scheduler::{Engine, Scheduler};
use baton_telemetry::metrics::WorkerMetrics;
use baton_telemetry::trace::Tracing;
use tokio::sync::oneshot;

use super::handle::StepHandle;
use super::run::{Parts, StepLoop};
use crate::cpus::{CpuList, Turns, settle_current_thread};
use crate::state::{Lifecycle, State};
use crate::{Clock, WorkerError};

/// How the thread is set up; threads that the engine starts inherit it.
#[derive(Clone, Debug)]
pub struct StepThreadOptions {
    /// CPUs to bind to.
    pub cpus: Option<CpuList>,
    /// How much it gives way to others, 0 to 19; above 0 its steps yield now and then.
    pub nice: i32,
    /// The worker's clock.
    pub clock: Clock,
    /// Where spans of steps go.
    pub tracing: Tracing,
    /// A gap between two tokens is a stall when it exceeds a step that only decodes by this.
    pub stall_threshold: Duration,
}

/// What the loop runs.
pub struct Built {
    /// The model executor.
    pub engine: Box<dyn Engine>,
    /// Over the pool of the engine's arena.
    pub scheduler: Scheduler,
}

/// The running thread.
pub struct StepThread {
    /// Talks to the loop; commands sent before it is built wait.
    pub handle: StepHandle,
    /// Whether building succeeded.
    pub built: oneshot::Receiver<Result<(), WorkerError>>,
    /// Ends after [`StepHandle::stop`] or an engine failure.
    pub join: JoinHandle<()>,
}

impl StepThread {
    /// Starts the thread, which builds the engine with `build` and then loops. The lifecycle turns to failed
    /// when the engine does.
    ///
    /// # Errors
    /// [`WorkerError::System`] when the system gives no thread.
    pub fn spawn(
        options: StepThreadOptions,
        metrics: WorkerMetrics,
        lifecycle: Lifecycle,
        build: impl FnOnce(&StepHandle) -> Result<Built, WorkerError> + Send + 'static,
    ) -> Result<Self, WorkerError> {
        let (handle, commands) = StepHandle::new();
        let (sender, built) = oneshot::channel();
        let shared = Arc::clone(&handle.shared);
        let building = handle.clone();
        let run = move || {
            // Set first, so that a stop that comes while the engine is built is not slept over.
            let _ = shared.thread.set(std::thread::current());
            settle_current_thread("step", options.cpus.as_ref(), options.nice);
            if options.nice > 0
                && let Err(error) = Turns::Yielding.take()
            {
                tracing::debug!(%error, "the step thread can't be given turns of its own");
            }
            let Built { engine, scheduler } = match build(&building) {
                Ok(built) => built,
                Err(error) => {
                    let _ = sender.send(Err(error));
                    return;
                }
            };
            // The loop ends when it is told to, not when handles are gone; but it must not be the one that keeps a sender.
            drop(building);
            let waker = Arc::clone(&shared);
            scheduler.pool().on_free(Box::new(move || waker.wake()));
            let _ = sender.send(Ok(()));
            let _failure = FailOnPanic(lifecycle.clone());
            let StepThreadOptions { clock, tracing, stall_threshold, nice, .. } = options;
            let parts = Parts {
                shared,
                commands,
                scheduler,
                engine,
                clock,
                metrics,
                tracing,
                stall_threshold,
                gives_way: nice > 0,
            };
            if let Err(error) = StepLoop::new(parts).run() {
                lifecycle.set(State::Failed(error.to_string()));
            }
        };
        let join = std::thread::Builder::new()
            .name("step".to_owned())
            .spawn(run)
            .map_err(WorkerError::system("start the step thread"))?;
        Ok(Self { handle, built, join })
    }
}

/// A panic on the step thread fails the worker instead of leaving it silent.
struct FailOnPanic(Lifecycle);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.set(State::Failed("the step thread panicked".to_owned()));
        }
    }
}
