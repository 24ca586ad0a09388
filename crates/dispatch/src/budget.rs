//! What a request may still spend on failures: one budget for all its groups.

use baton_handoff::InstanceId;

use crate::RetryLimits;

/// Counts failures by the worker they blame.
///
/// A worker that falls over fails every attempt that ran on it, of however many groups. That is one failure: attempts opened
/// before a worker was blamed share the charge; one opened there afterwards is charged anew.
#[derive(Debug)]
pub(crate) struct Budget {
    limits: RetryLimits,
    num_opened: u32,
    blamed: Vec<Blame>,
    lost: Vec<InstanceId>,
    num_retries: u32,
    num_replacements: u32,
    num_left: u32,
}

/// Workers that a request leaves at no charge. More than a fleet has that is restarted while a request runs, and a bound all the same.
const MAX_LEFT: u32 = 64;

#[derive(Debug)]
struct Blame {
    worker: InstanceId,
    /// Attempts opened when it was last charged.
    num_opened: u32,
}

/// The budget is used up.
#[derive(Debug)]
pub(crate) struct Spent;

impl Budget {
    pub(crate) const fn new(limits: RetryLimits) -> Self {
        Self {
            limits,
            num_opened: 0,
            blamed: Vec::new(),
            lost: Vec::new(),
            num_retries: 0,
            num_replacements: 0,
            num_left: 0,
        }
    }

    /// An attempt is opened: which one of the request it is, from 1.
    pub(crate) const fn open(&mut self) -> u32 {
        self.num_opened += 1;
        self.num_opened
    }

    pub(crate) const fn has_opened(&self) -> bool {
        self.num_opened > 0
    }

    /// Failures charged as retries.
    pub(crate) const fn num_retries(&self) -> u32 {
        self.num_retries
    }

    /// Workers that failed this request.
    pub(crate) fn avoid(&self) -> Vec<InstanceId> {
        self.blamed.iter().map(|blame| blame.worker).collect()
    }

    /// The `nth` attempt failed, and this worker is to blame. Answers how many retries came before this one.
    pub(crate) fn retry(&mut self, worker: InstanceId, nth: u32) -> Result<u32, Spent> {
        let shares = |blame: &Blame| blame.worker == worker && nth <= blame.num_opened;
        if !self.blamed.iter().any(shares) {
            if self.num_retries >= self.limits.max_retries {
                return Err(Spent);
            }
            self.num_retries += 1;
            self.blame(worker);
        }
        Ok(self.num_retries.saturating_sub(1))
    }

    /// The `nth` attempt has to leave this worker, which ends in good order. False when that is to be charged like a failure: it was left before,
    /// and was chosen again.
    pub(crate) fn leave(&mut self, worker: InstanceId, nth: u32) -> bool {
        if let Some(blame) = self.blamed.iter().find(|blame| blame.worker == worker) {
            return nth <= blame.num_opened;
        }
        let is_free = self.num_left < MAX_LEFT;
        if is_free {
            self.num_left += 1;
            self.blame(worker);
        }
        is_free
    }

    /// This worker is no better place for what comes next; somebody else was charged.
    pub(crate) fn shun(&mut self, worker: InstanceId) {
        if self.blamed.iter().all(|blame| blame.worker != worker) {
            self.blame(worker);
        }
    }

    /// This worker had no room. Answers how many placements were repeated before this one.
    pub(crate) fn place_again(&mut self, worker: Option<InstanceId>) -> Result<u32, Spent> {
        if self.num_replacements >= self.limits.max_replacements {
            return Err(Spent);
        }
        self.num_replacements += 1;
        if let Some(worker) = worker {
            self.blame(worker);
        }
        Ok(self.num_replacements - 1)
    }

    /// A worker fell over under this request. Each counts once, however many streams broke with it.
    pub(crate) fn lose(&mut self, worker: InstanceId) -> Result<(), Spent> {
        if !self.lost.contains(&worker) {
            self.lost.push(worker);
        }
        let num = u32::try_from(self.lost.len()).unwrap_or(u32::MAX);
        if num >= self.limits.max_workers_lost { Err(Spent) } else { Ok(()) }
    }

    fn blame(&mut self, worker: InstanceId) {
        self.blamed.retain(|blame| blame.worker != worker);
        self.blamed.push(Blame { worker, num_opened: self.num_opened });
    }
}
