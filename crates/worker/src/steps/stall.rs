//! Which gaps between tokens are stalls, and why. Pure: it is told of steps and of gaps, and allocates nothing after its start.

use std::collections::VecDeque;
use std::time::Duration;

use baton_handoff::RequestId;
use baton_scheduler::Time;
use baton_telemetry::StallCause;
use baton_telemetry::trace::TraceContext;

/// Steps that may explain a gap, at most: a gap over more steps than that is a preemption.
const NUM_NOTES: usize = 32;

/// Whether others' prompts were in the step, so that every excess over decoding alone is theirs.
pub(super) const fn is_chunk(cause: StallCause) -> bool {
    matches!(cause, StallCause::LocalPrefill | StallCause::Resume)
}

/// A request as others name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its id.
    pub request: RequestId,
    /// Its trace, and the span here that serves it.
    pub trace: Option<TraceContext>,
}

/// A gap between two tokens that was longer than decoding alone explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Number of the sequence within its request.
    pub sequence: u32,
    /// When the token before it came.
    pub from: Time,
    /// When the one after it came.
    pub to: Time,
    /// Why.
    pub cause: StallCause,
    /// By how much it exceeded a step that only decodes.
    pub blocked: Duration,
    /// Whose prompt was computed meanwhile.
    pub blocker: Option<Owner>,
}

/// What a gap was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    pub(super) cause: StallCause,
    /// Beyond what a step that only decodes takes; zero where that is not known.
    pub(super) blocked: Duration,
    pub(super) blocker: Option<Owner>,
    pub(super) is_stall: bool,
}

/// A step in which there was more than decoding.
#[derive(Clone, Copy)]
struct Note {
    began: Time,
    ended: Time,
    cause: StallCause,
    blocker: Option<Owner>,
}

/// A prompt's chunk of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub(super) num_tokens: usize,
    /// Of a sequence that comes back from preemption or from another worker.
    pub(super) is_resume: bool,
    pub(super) owner: Owner,
}

/// Follows the steps.
pub(super) struct StallWatch {
    threshold: Duration,
    notes: VecDeque<Note>,
    began: Time,
    /// Of the step under way: what it would take without prompts.
    expected: Option<Duration>,
    num_decoding: u32,
    largest: Option<Chunk>,
    /// Since the start.
    num_steps: u64,
}

impl StallWatch {
    pub(super) fn new(threshold: Duration) -> Self {
        Self {
            threshold,
            notes: VecDeque::with_capacity(NUM_NOTES),
            began: Time::ZERO,
            expected: None,
            num_decoding: 0,
            largest: None,
            num_steps: 0,
        }
    }

    /// A step is about to be computed; its rows follow.
    pub(super) fn begin(&mut self, now: Time) {
        (self.began, self.expected, self.num_decoding, self.largest) = (now, None, 0, None);
        self.num_steps += 1;
    }

    /// A running sequence gets a token in this step.
    pub(super) fn decodes(&mut self) {
        self.num_decoding += 1;
    }

    /// A prompt's chunk is in this step.
    pub(super) fn chunk(&mut self, chunk: Chunk) {
        if self.largest.is_none_or(|largest| chunk.num_tokens > largest.num_tokens) {
            self.largest = Some(chunk);
        }
    }

    /// All rows are known. `expected` is what the rows that decode would take alone, as far as that is known.
    pub(super) fn expect(&mut self, expected: Option<Duration>) {
        self.expected = expected;
    }

    /// Sequences that decode in this step.
    pub(super) const fn num_decoding(&self) -> u32 {
        self.num_decoding
    }

    /// Steps that began until now.
    pub(super) const fn num_steps(&self) -> u64 {
        self.num_steps
    }

    /// When this step began.
    pub(super) const fn began(&self) -> Time {
        self.began
    }

    /// The step was computed.
    pub(super) fn end(&mut self, now: Time, num_copies: usize) {
        let (cause, blocker) = match self.largest {
            Some(Chunk { is_resume: true, owner, .. }) => (StallCause::Resume, Some(owner)),
            Some(Chunk { owner, .. }) => (StallCause::LocalPrefill, Some(owner)),
            None if num_copies > 0 => (StallCause::Copy, None),
            None => return,
        };
        if self.notes.len() == NUM_NOTES {
            self.notes.pop_front();
        }
        self.notes.push_back(Note { began: self.began, ended: now, cause, blocker });
    }

    /// What the gap from `from` to the end of the last step was, of `num_steps` steps: more than one where a row is computed in parts. Of several steps the
    /// longest one with more than decoding explains it.
    pub(super) fn gap(&self, (from, to): (Time, Time), num_steps: u32, was_preempted: bool) -> Gap {
        let within = self.notes.iter().rev().take_while(|note| note.ended > from);
        let longest = within.max_by_key(|note| note.ended - note.began);
        let (cause, blocker) = match longest {
            _ if was_preempted => (StallCause::Preemption, None),
            Some(note) => (note.cause, note.blocker),
            None => (StallCause::SlowStep, None),
        };
        // Before the first step that only decoded, all of a step with a prompt counts, and of others nothing.
        let unknown = if is_chunk(cause) { Duration::ZERO } else { Duration::MAX };
        let expected =
            self.expected.map(|step| if was_preempted { step } else { step.saturating_mul(num_steps) });
        let blocked = to.saturating_sub(from).saturating_sub(expected.unwrap_or(unknown));
        Gap { cause, blocked, blocker, is_stall: blocked >= self.threshold }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Time {
        Duration::from_millis(n)
    }

    fn owner(n: u8) -> Owner {
        Owner { request: RequestId([n; 16]), trace: None }
    }

    fn chunk(num_tokens: usize, is_resume: bool, n: u8) -> Chunk {
        Chunk { num_tokens, is_resume, owner: owner(n) }
    }

    /// A step of `ms` from and to, with these chunks.
    fn step(watch: &mut StallWatch, from: u64, to: u64, chunks: &[Chunk], num_copies: usize) {
        watch.begin(ms(from));
        watch.decodes();
        for &one in chunks {
            watch.chunk(one);
        }
        watch.expect(Some(ms(10)));
        watch.end(ms(to), num_copies);
    }

    #[test]
    fn each_cause_is_known_and_the_largest_chunk_is_the_blocker() {
        let mut watch = StallWatch::new(ms(20));
        step(&mut watch, 100, 140, &[chunk(8, true, 1), chunk(64, false, 2), chunk(8, false, 3)], 1);
        let gap = watch.gap((ms(100), ms(140)), 1, false);
        let want =
            Gap { cause: StallCause::LocalPrefill, blocked: ms(30), blocker: Some(owner(2)), is_stall: true };
        assert_eq!(gap, want);
        step(&mut watch, 140, 200, &[chunk(64, true, 1)], 0);
        let gap = watch.gap((ms(140), ms(200)), 1, false);
        assert_eq!((gap.cause, gap.blocker, gap.blocked), (StallCause::Resume, Some(owner(1)), ms(50)));
        step(&mut watch, 200, 240, &[], 2);
        assert_eq!(watch.gap((ms(200), ms(240)), 1, false).cause, StallCause::Copy);
        step(&mut watch, 240, 280, &[], 0);
        let gap = watch.gap((ms(240), ms(280)), 1, false);
        assert_eq!((gap.cause, gap.blocker, gap.is_stall), (StallCause::SlowStep, None, true));
        let gap = watch.gap((ms(100), ms(280)), 1, true);
        assert_eq!((gap.cause, gap.blocked), (StallCause::Preemption, ms(170)));
    }

    #[test]
    fn what_is_short_of_the_threshold_is_blocked_but_no_stall() {
        let mut watch = StallWatch::new(ms(20));
        step(&mut watch, 0, 29, &[chunk(16, false, 1)], 0);
        let gap = watch.gap((ms(0), ms(29)), 1, false);
        assert_eq!((gap.blocked, gap.is_stall), (ms(19), false));
        assert!(watch.gap((ms(0), ms(30)), 1, false).is_stall);
        // Quicker than expected.
        assert_eq!(watch.gap((ms(25), ms(29)), 1, false).blocked, ms(0));
    }

    #[test]
    fn a_gap_over_several_steps_is_explained_by_the_longest_within_it() {
        let mut watch = StallWatch::new(ms(20));
        step(&mut watch, 0, 500, &[chunk(16, false, 9)], 0);
        step(&mut watch, 500, 540, &[chunk(16, false, 1)], 0);
        step(&mut watch, 540, 640, &[chunk(16, false, 2)], 0);
        step(&mut watch, 640, 650, &[], 0);
        assert_eq!(watch.gap((ms(500), ms(650)), 1, false).blocker, Some(owner(2)));
        for n in 0..100 {
            step(&mut watch, 650 + n, 651 + n, &[chunk(16, false, 3)], 0);
        }
        assert_eq!((watch.notes.len(), watch.notes.capacity()), (NUM_NOTES, NUM_NOTES));
    }

    #[test]
    fn a_row_in_parts_may_take_as_many_steps() {
        let mut watch = StallWatch::new(ms(20));
        for n in 0..4 {
            step(&mut watch, 11 * n, 11 * (n + 1), &[], 0);
        }
        assert_eq!(watch.num_steps(), 4);
        let gap = watch.gap((ms(0), ms(44)), 4, false);
        assert_eq!((gap.blocked, gap.is_stall), (ms(4), false));
        assert_eq!(watch.gap((ms(0), ms(44)), 4, true).blocked, ms(34), "it waited, and was computed in one");
    }

    #[test]
    fn before_anything_only_decoded_a_slow_step_is_no_stall_but_a_prompt_blocks() {
        let mut watch = StallWatch::new(ms(20));
        watch.begin(ms(0));
        watch.end(ms(100), 0);
        assert!(!watch.gap((ms(0), ms(100)), 1, false).is_stall);
        watch.begin(ms(100));
        watch.chunk(chunk(64, false, 1));
        watch.end(ms(200), 0);
        assert_eq!(watch.gap((ms(100), ms(200)), 1, false).blocked, ms(100));
    }
}
