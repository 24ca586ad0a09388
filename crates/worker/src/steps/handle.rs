//! The shell's side of the step loop.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use baton_handoff::Cause;
use baton_scheduler::{FirstToken, NewSequence, Origin, SamplingParams, SequenceId};
use tokio::sync::{mpsc, watch};

use super::message::{Command, LayerSink, Live, Load, Slot, Stamped, Submit};

/// Commands on their way to the loop, at most; senders wait for room.
const COMMAND_BUFFER: usize = 1024;

/// Events that a reader may be behind, at most; then its sequence is cancelled.
const EVENT_BUFFER: usize = 1024;

/// A sequence to be run; the loop gives it an id.
#[derive(Clone)]
pub struct Submission {
    /// Where its KV comes from.
    pub origin: Origin,
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Tokens at the prompt's end that were generated before; fewer than the prompt has.
    pub num_generated: u32,
    /// Tokens to generate, at least one.
    pub max_new_tokens: u32,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// Hears which layers of it are complete.
    pub sink: Option<Arc<dyn LayerSink>>,
}

/// What the loop and its handles share.
#[derive(Default)]
pub(super) struct Shared {
    /// The loop's thread, once it runs.
    pub(super) thread: OnceLock<Thread>,
    /// Advanced after every layer.
    pub(super) progress: AtomicU64,
    /// Sequences dropped since the loop looked last.
    pub(super) num_cancels: AtomicU32,
    pub(super) stop: AtomicBool,
    pub(super) load: watch::Sender<Load>,
    next_id: AtomicU64,
}

impl Shared {
    /// Ends the loop's sleep, or the next one before it begins.
    pub(super) fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// Talks to the step loop; clones talk to the same one.
#[derive(Clone)]
pub struct StepHandle {
    pub(super) shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
}

impl StepHandle {
    pub(super) fn new() -> (Self, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel(COMMAND_BUFFER);
        (Self { shared: Arc::default(), commands }, receiver)
    }

    /// Hands a sequence to the loop. Whether it is accepted comes as an event.
    ///
    /// # Errors
    /// [`Cause::Engine`] when the loop has ended.
    pub async fn submit(&self, new: Submission) -> Result<Sequence, Cause> {
        let id = SequenceId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let slot = Arc::new(Slot::default());
        let (sender, events) = mpsc::channel(EVENT_BUFFER);
        let sequence = NewSequence {
            id,
            origin: new.origin,
            prompt: new.prompt,
            sampling: new.sampling,
            sequence: 0,
            num_generated: new.num_generated,
            max_new_tokens: new.max_new_tokens,
            stop_tokens: new.stop_tokens,
            cache: true,
        };
        let live = Live { slot: Arc::clone(&slot), events: sender, sink: new.sink, first_step: None };
        // Made first: if this future is dropped while it waits for room, the drop of `handle` cancels.
        let handle = Sequence { id, steps: self.clone(), slot, events };
        match self.send(Command::Submit(Box::new(Submit { sequence, live }))).await {
            true => Ok(handle),
            false => Err(Cause::Engine),
        }
    }

    async fn send(&self, command: Command) -> bool {
        let sent = self.commands.send(command).await.is_ok();
        self.shared.wake();
        sent
    }

    /// Counts layers computed since the start: work without progress is a stall.
    pub fn progress(&self) -> u64 {
        self.shared.progress.load(Ordering::Relaxed)
    }

    /// How busy the loop is, and how to hear when that changes.
    pub fn load(&self) -> watch::Receiver<Load> {
        self.shared.load.subscribe()
    }

    /// Ends the loop within a layer; every sequence ends with [`Cause::Draining`].
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
    }
}

/// A live sequence. Dropping it ends the sequence in whatever stage, within a layer; its blocks return, leased ones when
/// their lease ends.
pub struct Sequence {
    id: SequenceId,
    steps: StepHandle,
    slot: Arc<Slot>,
    events: mpsc::Receiver<Stamped>,
}

impl Sequence {
    /// The next event; `None` when there will be no more, see [`Sequence::ended_by`].
    pub async fn next(&mut self) -> Option<Stamped> {
        self.events.recv().await
    }

    /// Why the loop ended it; meaningful after [`Sequence::next`] said `None` before a last event came.
    pub fn ended_by(&self) -> Cause {
        // A loop that died told nobody.
        self.slot.end.get().copied().unwrap_or(Cause::Engine)
    }

    /// Prefill: the destination has room and holds the first `skip_tokens` tokens already.
    pub async fn grant(&self, skip_tokens: usize) {
        self.steps.send(Command::Grant(self.id, skip_tokens)).await;
    }

    /// Remote: an offer came; [`super::SequenceEvent::Reserved`] follows when there is room.
    pub async fn reserve(&self) {
        self.steps.send(Command::Reserve(self.id)).await;
    }

    /// Remote: every byte is verified; [`super::SequenceEvent::Started`] follows, or the end when the token finished it.
    pub async fn commit(&self, first: FirstToken) {
        self.steps.send(Command::Commit(self.id, first)).await;
    }

    /// Remote: the source is done; [`super::SequenceEvent::Boundary`] says when the sequence could have run.
    pub async fn notice(&self) {
        self.steps.send(Command::Notice(self.id)).await;
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.slot.cancelled.store(true, Ordering::SeqCst);
        self.steps.shared.num_cancels.fetch_add(1, Ordering::SeqCst);
        self.steps.shared.wake();
    }
}
