//! The loop's ends of live sequences, by id. The sequences of a group share everything but their number.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_handoff::Cause;
use baton_scheduler::{NewSequence, Origin, SequenceId, Time};
use baton_telemetry::metrics::WorkerMetrics;
use tokio::sync::mpsc;

use super::ledger::AvoidedStall;
use super::message::{LayerSink, Live, Slot, Stamped, nth_id};
use super::stall::{Owner, Stall, StallWatch, is_chunk};
use super::stats::RunBoard;

/// What the sequences of one submission share. It is gone when the last of them is over, and with it the channel of events: so
/// their reader hears the end.
pub(super) struct Group {
    pub(super) slot: Arc<Slot>,
    pub(super) events: mpsc::Sender<Stamped>,
    pub(super) sink: Option<Arc<dyn LayerSink>>,
    /// Whose it is.
    pub(super) owner: Owner,
    /// Id of the first sequence, which stands for all of them until the fork.
    pub(super) head: SequenceId,
    /// Its prompt is computed for another worker.
    pub(super) is_prefill: bool,
    /// Its KV comes from another worker.
    is_remote: bool,
    /// It was generated in part before: its prompt is computed again.
    pub(super) is_resume: bool,
    /// When the first step with it began.
    pub(super) first_step: Cell<Option<Time>>,
    /// It runs: its sequences are apart.
    pub(super) started: Cell<bool>,
    /// When it began to.
    started_at: Cell<Time>,
    /// Steps of the worker that had begun by then.
    started_step: Cell<u64>,
    /// Who ran when room was reserved for its prompt, to be computed elsewhere.
    victims: RefCell<Vec<SequenceId>>,
    /// What they were spared.
    pub(super) avoided: Cell<Option<AvoidedStall>>,
    /// The first sequence was stopped while it still stood for others.
    pub(super) head_stopped: Cell<bool>,
    /// Sequences that are not over.
    pub(super) num_open: Cell<u32>,
}

/// One sequence.
pub(super) struct Member {
    pub(super) group: Rc<Group>,
    /// Its number within the request.
    pub(super) sequence: u32,
    /// Where its run is counted; on a prefill worker nowhere.
    board: Option<Arc<RunBoard>>,
    /// When its last token came from here, and the number of the step that gave it.
    last_token: Cell<Option<(Time, u64)>>,
    /// It gave up its blocks and is to be computed again.
    pub(super) preempted: Cell<bool>,
}

/// The ids and numbers of a submission's sequences: both count on from those of the first.
pub(super) struct NewIds {
    head: SequenceId,
    first_sequence: u32,
    num: u32,
    origin: Origin,
    is_resume: bool,
}

impl NewIds {
    pub(super) fn of(new: &NewSequence) -> Self {
        Self {
            head: new.id,
            first_sequence: new.sequence,
            num: 1 + new.siblings.len() as u32,
            origin: new.origin,
            is_resume: new.preempted || new.num_generated > 0,
        }
    }
}

/// All live sequences.
#[derive(Default)]
pub(super) struct Members {
    by_id: HashMap<SequenceId, Member>,
}

impl Members {
    /// Takes in a group that was accepted.
    pub(super) fn insert(&mut self, new: NewIds, live: Live) {
        let NewIds { head, first_sequence, num, origin, is_resume } = new;
        let Live { slot, events, sink, owner, boards } = live;
        let group = Rc::new(Group {
            slot,
            events,
            sink,
            owner,
            head,
            is_prefill: origin == Origin::Prefill,
            is_remote: origin == Origin::Remote,
            is_resume,
            first_step: Cell::new(None),
            started: Cell::new(false),
            started_at: Cell::new(Time::ZERO),
            started_step: Cell::new(0),
            victims: RefCell::default(),
            avoided: Cell::new(None),
            head_stopped: Cell::new(false),
            num_open: Cell::new(num),
        });
        for nth in 0..num {
            let member = Member {
                group: Rc::clone(&group),
                sequence: first_sequence + nth,
                board: boards.get(nth as usize).cloned(),
                last_token: Cell::new(None),
                preempted: Cell::new(false),
            };
            self.by_id.insert(nth_id(head, nth), member);
        }
    }

    pub(super) fn get(&self, id: SequenceId) -> Option<&Member> {
        self.by_id.get(&id)
    }

    /// A sequence is over; returns its group, which others may still belong to.
    pub(super) fn remove(&mut self, id: SequenceId) -> Option<Rc<Group>> {
        let group = self.by_id.remove(&id)?.group;
        group.num_open.update(|num| num - 1);
        Some(group)
    }

    /// All of a group is over; `each` hears the ids.
    pub(super) fn remove_group(&mut self, head: SequenceId, mut each: impl FnMut(SequenceId)) {
        self.by_id.retain(|&id, member| {
            let over = member.group.head == head;
            if over {
                each(id);
            }
            !over
        });
    }

    /// Takes out the sequences whose handles were dropped; `each` hears their ids.
    pub(super) fn remove_cancelled(&mut self, mut each: impl FnMut(SequenceId)) {
        self.by_id.retain(|&id, member| {
            let cancelled = member.group.slot.cancelled.load(Ordering::SeqCst);
            if cancelled {
                each(id);
            }
            !cancelled
        });
    }

    /// Room was reserved at `at` for the prompt of `id`, which is computed elsewhere: who ran here then would have waited, had it been computed here.
    pub(super) fn note_victims(&self, id: SequenceId, at: Time) {
        let Some(Member { group, .. }) = self.get(id) else { return };
        let ran = |other: &Member| {
            other.runs()
                && other.group.started_at.get() <= at
                && other.group.owner.request != group.owner.request
        };
        let victims = self.by_id.iter().filter(|(_, other)| ran(other)).map(|(&id, _)| id);
        group.victims.replace(victims.collect());
    }

    /// Each of the victims of `id` was spared so many seconds. Those that are over count too; they have nobody to tell.
    pub(super) fn spare_victims(&self, id: SequenceId, each_s: f64) -> AvoidedStall {
        let Some(Member { group, .. }) = self.get(id) else { return AvoidedStall::default() };
        let victims = group.victims.take();
        for victim in victims.iter().filter_map(|&victim| self.get(victim)) {
            if let Some(board) = &victim.board {
                board.avoided(each_s);
            }
        }
        let avoided = AvoidedStall::new(victims.len(), each_s);
        group.avoided.set(Some(avoided));
        avoided
    }

    /// Tells every reader why there will be no more events.
    pub(super) fn end_all(&self, cause: Cause) {
        for member in self.by_id.values() {
            let _ = member.group.slot.end.set(cause);
        }
    }
}

impl Member {
    /// Whether each step gives it a token.
    pub(super) fn runs(&self) -> bool {
        self.group.started.get() && !self.preempted.get()
    }

    /// A token of it came from the last step; returns the stall that this ended.
    pub(super) fn token(&self, at: Time, watch: &StallWatch, metrics: &WorkerMetrics) -> Option<Stall> {
        let was_preempted = self.preempted.replace(false);
        let board = self.board.as_ref()?;
        // The first token of what was computed here is no gap; that of what came from elsewhere is one from its start here.
        let start =
            self.group.is_remote.then(|| (self.group.started_at.get(), self.group.started_step.get()));
        let (from, step) = self.last_token.replace(Some((at, watch.num_steps()))).or(start)?;
        let num_steps = u32::try_from(watch.num_steps() - step).unwrap_or(u32::MAX);
        let gap = watch.gap((from, at), num_steps, was_preempted);
        board.token(at.saturating_sub(from), watch.num_decoding());
        if gap.is_stall || is_chunk(gap.cause) {
            metrics.blocked(gap.cause.name(), gap.blocked.as_secs_f64());
        }
        if !gap.is_stall {
            return None;
        }
        metrics.stalled(gap.cause.name());
        board.stall(gap.blocked);
        let (cause, blocked, blocker) = (gap.cause, gap.blocked, gap.blocker);
        Some(Stall { sequence: self.sequence, from, to: at, cause, blocked, blocker })
    }
}

impl Group {
    /// It runs from now on.
    pub(super) fn start(&self, at: Time, watch: &StallWatch) {
        self.started.set(true);
        self.started_at.set(at);
        self.started_step.set(watch.num_steps());
    }

    /// Tells what nobody has to know: a reader that is behind keeps its room for what it must.
    pub(super) fn tell_aside(&self, event: Stamped) {
        if 2 * self.events.capacity() > self.events.max_capacity() {
            // One that is gone needs nothing.
            let _ = self.events.try_send(event);
        }
    }

    /// Whether the first sequence still stands for others.
    pub(super) fn is_whole(&self) -> bool {
        !self.started.get() && self.num_open.get() > 1
    }

    /// Whether nobody wants the rest of it: only the first sequence is left, and that was stopped.
    pub(super) fn is_unwanted(&self) -> bool {
        self.head_stopped.get() && self.num_open.get() == 1
    }
}
