//! The shell's side of the step loop.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use baton_handoff::{Cause, RequestId};
use baton_scheduler::{FirstToken, NewSequence, Origin, SamplingParams, SequenceId, StepCost, Time};
use baton_telemetry::trace::TraceContext;
use tokio::sync::{mpsc, oneshot, watch};

use super::cache_feed::CacheView;
use super::message::{Command, LayerSink, Live, Load, Slot, Stamped, Submit, nth_id};
use super::profile::{KindProfile, StepProfile};
use super::rates::StepRates;
use super::stall::Owner;
use super::stats::{RunBoard, RunStats};

/// Commands on their way to the loop, at most; senders wait for room.
const COMMAND_BUFFER: usize = 1024;

/// Events that a reader may be behind, at most, for each sequence; then its group is cancelled.
const EVENT_BUFFER: usize = 1024;

/// A group of sequences to be run from one prompt; the loop gives them ids.
#[derive(Clone)]
pub struct Submission {
    /// Whose it is.
    pub request: RequestId,
    /// The trace it belongs to, and the span here that serves it.
    pub trace: Option<TraceContext>,
    /// Where its KV comes from.
    pub origin: Origin,
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// How many sequences, 1 to [`baton_handoff::MAX_SEQUENCES`]; more than one only without tokens generated before.
    pub num_sequences: u32,
    /// Number of the first within the request; the others count on from it.
    pub first_sequence: u32,
    /// Tokens at the prompt's end that were generated before; fewer than the prompt has.
    pub num_generated: u32,
    /// Tokens to generate in each, at least one.
    pub max_new_tokens: u32,
    /// Tokens that end a sequence.
    pub stop_tokens: Vec<u32>,
    /// Whether its blocks are looked up in, and added to, the prefix cache.
    pub cache: bool,
    /// How long ago the router accepted the request.
    pub age: Duration,
    /// A lower one is served earlier.
    pub priority: i32,
    /// It was preempted and comes back.
    pub preempted: bool,
    /// Hears which layers of it are complete.
    pub sink: Option<Arc<dyn LayerSink>>,
}

/// What steps take.
#[derive(Clone, Copy, Default)]
pub(super) struct Learnt {
    /// As last fitted.
    fit: Option<StepCost>,
    /// How far that is off: mean of |expected - measured| / measured over recent steps.
    residual: f64,
    /// By what factor the last steps took longer.
    level: f64,
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
    pub(super) rates: StepRates,
    /// What steps take.
    pub(super) step_cost: Mutex<Learnt>,
    /// What turns of the loop took lately, by kind of step.
    pub(super) profile: StepProfile,
    next_id: AtomicU64,
}

impl Shared {
    /// The loop learnt what steps take: a fit now and then, how far it is off with every step. It never waits for a reader: what is not
    /// told now is told with the next.
    pub(super) fn learnt(&self, fit: Option<StepCost>, residual: f64, level: f64) {
        if let Ok(mut told) = self.step_cost.try_lock() {
            *told = Learnt { fit: fit.or(told.fit), residual, level };
        }
    }

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

    /// Hands a group of sequences to the loop. Whether it is accepted comes as an event.
    ///
    /// # Errors
    /// [`Cause::Engine`] when the loop has ended.
    pub async fn submit(&self, new: Submission) -> Result<Sequence, Cause> {
        let num = new.num_sequences.max(1);
        let id = SequenceId(self.shared.next_id.fetch_add(u64::from(num), Ordering::Relaxed));
        let slot = Arc::new(Slot::default());
        let (sender, events) = mpsc::channel(EVENT_BUFFER * num as usize);
        let sequence = NewSequence {
            id,
            siblings: (1..num).map(|nth| nth_id(id, nth)).collect(),
            origin: new.origin,
            prompt: new.prompt,
            sampling: new.sampling,
            sequence: new.first_sequence,
            num_generated: new.num_generated,
            max_new_tokens: new.max_new_tokens,
            stop_tokens: new.stop_tokens,
            cache: new.cache,
            age: new.age,
            priority: new.priority,
            preempted: new.preempted,
        };
        let owner = Owner { request: new.request, trace: new.trace };
        let num_boards = if new.origin == Origin::Prefill { 0 } else { num };
        let boards: Vec<Arc<RunBoard>> = (0..num_boards).map(|_| Arc::default()).collect();
        let live =
            Live { slot: Arc::clone(&slot), events: sender, sink: new.sink, owner, boards: boards.clone() };
        // Made first: if this future is dropped while it waits for room, the drop of `handle` cancels.
        let handle =
            Sequence { id, first: new.first_sequence, num, steps: self.clone(), slot, events, boards };
        match self.send(Command::Submit(Box::new(Submit { sequence, live }))).await {
            true => Ok(handle),
            false => Err(Cause::Engine),
        }
    }

    /// What the prefix cache holds, and what changes from then on. `None` when the loop has ended.
    pub async fn watch_cache(&self) -> Option<CacheView> {
        let (sender, view) = oneshot::channel();
        self.send(Command::WatchCache(sender)).await;
        view.await.ok()
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

    /// How fast it computes.
    pub fn rates(&self) -> &StepRates {
        &self.shared.rates
    }

    /// What a step is expected to take, and the mean of |expected - measured| / measured over recent steps; `None` before enough
    /// steps ran.
    pub fn step_cost(&self) -> Option<(StepCost, f64)> {
        let learnt = self.learnt();
        Some((learnt.fit?, learnt.residual))
    }

    /// The same at the level of the last steps: about what those of the last prompt took, whatever else used this machine meanwhile.
    pub fn step_cost_now(&self) -> Option<(StepCost, f64)> {
        let (cost, residual) = self.step_cost()?;
        let level = self.learnt().level;
        let cost = StepCost {
            fixed_s: level * cost.fixed_s,
            per_token_s: level * cost.per_token_s,
            per_context_token_s: level * cost.per_context_token_s,
        };
        Some((cost, residual))
    }

    fn learnt(&self) -> Learnt {
        // It is copied in whole.
        *self.shared.step_cost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What turns of the loop took lately, by kind of step; kinds of which none was seen are left out.
    pub fn step_profile(&self) -> Vec<KindProfile> {
        self.shared.profile.read()
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

/// A live group of sequences, mostly of one. Dropping it ends all of them in whatever stage, within a layer; their blocks return,
/// leased ones when their lease ends.
pub struct Sequence {
    /// Of the first one, which stands for all until the fork.
    id: SequenceId,
    /// Number of the first one.
    first: u32,
    num: u32,
    steps: StepHandle,
    slot: Arc<Slot>,
    events: mpsc::Receiver<Stamped>,
    boards: Vec<Arc<RunBoard>>,
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

    /// How the sequence with this number ran up to now; all zero for one that is not of this group.
    pub fn stats(&self, sequence: u32) -> RunStats {
        let nth = sequence.checked_sub(self.first).map(|nth| nth as usize);
        nth.and_then(|nth| self.boards.get(nth)).map_or_else(RunStats::default, |board| board.read())
    }

    /// Remote: every byte is verified; `first` has the first token of each sequence, in order, and computing the prompt here would have
    /// added `prefill_s` seconds to steps, if that is known. [`super::SequenceEvent::Started`] follows, or the end when the tokens
    /// finished all.
    pub async fn commit(&self, first: Vec<FirstToken>, prefill_s: Option<f64>) {
        self.steps.send(Command::Commit(self.id, first, prefill_s)).await;
    }

    /// Ends the sequence with this number, its blocks return; the others go on. No event follows for it, and none at all when it was
    /// the last. One that is over already, or no sequence of this group, changes nothing.
    pub async fn stop(&self, sequence: u32) {
        if let Some(nth) = sequence.checked_sub(self.first).filter(|&nth| nth < self.num) {
            self.steps.send(Command::Stop(nth_id(self.id, nth))).await;
        }
    }

    /// Remote: the source was done at `at`, now or in the past; [`super::SequenceEvent::Boundary`] says when the sequence could have
    /// run.
    pub async fn notice(&self, at: Time) {
        self.steps.send(Command::Notice(self.id, at)).await;
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.slot.cancelled.store(true, Ordering::SeqCst);
        self.steps.shared.num_cancels.fetch_add(1, Ordering::SeqCst);
        self.steps.shared.wake();
    }
}
