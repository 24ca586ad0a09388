//! The loop's ends of live sequences, by id. The sequences of a group share everything but their number.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_handoff::Cause;
use baton_scheduler::{NewSequence, Origin, SequenceId, Time};
use tokio::sync::mpsc;

use super::message::{LayerSink, Live, Slot, Stamped, nth_id};

/// What the sequences of one submission share. It is gone when the last of them is over, and with it the channel of events: so
/// their reader hears the end.
pub(super) struct Group {
    pub(super) slot: Arc<Slot>,
    pub(super) events: mpsc::Sender<Stamped>,
    pub(super) sink: Option<Arc<dyn LayerSink>>,
    /// Id of the first sequence, which stands for all of them until the fork.
    pub(super) head: SequenceId,
    /// Its prompt is computed for another worker.
    pub(super) is_prefill: bool,
    /// When the first step with it began.
    pub(super) first_step: Cell<Option<Time>>,
    /// It runs: its sequences are apart.
    pub(super) started: Cell<bool>,
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
}

/// The ids and numbers of a submission's sequences: both count on from those of the first.
pub(super) struct NewIds {
    head: SequenceId,
    first_sequence: u32,
    num: u32,
    is_prefill: bool,
}

impl NewIds {
    pub(super) fn of(new: &NewSequence) -> Self {
        Self {
            head: new.id,
            first_sequence: new.sequence,
            num: 1 + new.siblings.len() as u32,
            is_prefill: new.origin == Origin::Prefill,
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
        let (NewIds { head, first_sequence, num, is_prefill }, Live { slot, events, sink }) = (new, live);
        let group = Rc::new(Group {
            slot,
            events,
            sink,
            head,
            is_prefill,
            first_step: Cell::new(None),
            started: Cell::new(false),
            head_stopped: Cell::new(false),
            num_open: Cell::new(num),
        });
        for nth in 0..num {
            let member = Member { group: Rc::clone(&group), sequence: first_sequence + nth };
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

    /// Tells every reader why there will be no more events.
    pub(super) fn end_all(&self, cause: Cause) {
        for member in self.by_id.values() {
            let _ = member.group.slot.end.set(cause);
        }
    }
}

impl Group {
    /// Whether the first sequence still stands for others.
    pub(super) fn is_whole(&self) -> bool {
        !self.started.get() && self.num_open.get() > 1
    }

    /// Whether nobody wants the rest of it: only the first sequence is left, and that was stopped.
    pub(super) fn is_unwanted(&self) -> bool {
        self.head_stopped.get() && self.num_open.get() == 1
    }
}
