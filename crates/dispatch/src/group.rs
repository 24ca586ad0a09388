//! A sequence group of a request: sequences that share legs.
//!
//! Group 0 is all of them. Once a token was delivered, a sequence that has to leave its legs goes on as a group of its own, numbered
//! one above the sequence, and stays that for good.

use std::ops::Range;

use crate::Time;
use crate::attempt::Attempt;

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) number: u32,
    pub(crate) first_sequence: u32,
    pub(crate) num_sequences: u32,
    /// Of the next attempt to open.
    pub(crate) attempt: u32,
    /// Placements in a row that found no worker.
    pub(crate) num_unplaced: u32,
    /// It was preempted, and did not run since.
    pub(crate) preempted: bool,
    pub(crate) stage: Stage,
}

#[derive(Debug)]
pub(crate) enum Stage {
    /// `Place` is out.
    Placing,
    /// Placed again at this time.
    Backoff { until: Time },
    /// Legs are open.
    Running(Attempt),
    /// `Place` is out for another decode worker; of this attempt the Prefill leg is open, whose worker holds the KV.
    Redirecting(Attempt),
    /// Its sequences are complete, or went on in groups of their own.
    Over,
}

impl Group {
    /// All sequences of a request.
    pub(crate) const fn whole(num_sequences: u32) -> Self {
        Self {
            number: 0,
            first_sequence: 0,
            num_sequences,
            attempt: 0,
            num_unplaced: 0,
            preempted: false,
            stage: Stage::Placing,
        }
    }

    /// One sequence on its own.
    pub(crate) fn of_one(sequence: u32, preempted: bool) -> Self {
        let number = sequence + 1;
        Self { number, first_sequence: sequence, num_sequences: 1, preempted, ..Self::whole(1) }
    }

    /// Numbers of its sequences, also of those that left.
    pub(crate) const fn sequences(&self) -> Range<u32> {
        self.first_sequence..self.first_sequence + self.num_sequences
    }

    pub(crate) const fn live(&mut self) -> Option<&mut Attempt> {
        if let Stage::Running(live) = &mut self.stage { Some(live) } else { None }
    }

    /// Whether this attempt of it is live.
    pub(crate) const fn runs(&self, attempt: u32) -> bool {
        matches!(&self.stage, Stage::Running(live) if live.legs.key.attempt == attempt)
    }

    pub(crate) const fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }
}
