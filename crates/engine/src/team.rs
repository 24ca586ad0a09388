//! A fixed team of threads that computes steps. The thread that calls [`Team::run`] is member 0; the others sleep
//! between runs. Work is shared out by member number alone.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crate::barrier::{Barrier, Broken};
use crate::parking::Parking;

/// One member within a run.
#[derive(Clone, Copy)]
pub(crate) struct Member<'a> {
    index: usize,
    count: usize,
    barrier: &'a Barrier,
}

impl Member<'_> {
    /// 0 for the calling thread.
    pub(crate) const fn index(self) -> usize {
        self.index
    }

    /// Members of the team.
    pub(crate) const fn count(self) -> usize {
        self.count
    }

    /// This member's share of `0..len`: contiguous, shares differ by at most one.
    pub(crate) const fn share(self, len: usize) -> Range<usize> {
        len * self.index / self.count..len * (self.index + 1) / self.count
    }

    /// Waits for the others.
    pub(crate) fn wait(self) -> Result<(), Broken> {
        self.barrier.wait()
    }
}

/// What the other members run; valid for the length of one [`Team::run`].
type Task = *const (dyn Fn(Member<'_>) + Sync);

/// Written by member 0 alone, while no member runs: before [`Shared::epoch`] says that a run began, and after
/// [`Shared::running`] says that it ended. Read by the others in between.
struct TaskCell(UnsafeCell<Option<Task>>);

// SAFETY: the closure behind the pointer is `Sync`, and `run` keeps it alive until every member is done; the two counters order
// every write before or after all reads.
unsafe impl Sync for TaskCell {}
// SAFETY: as above.
unsafe impl Send for TaskCell {}

struct Shared {
    barrier: Barrier,
    task: TaskCell,
    /// Counts runs.
    epoch: AtomicU64,
    /// Members that have not finished the current run.
    running: AtomicUsize,
    closing: AtomicBool,
    start: Parking,
    finish: Parking,
    count: usize,
}

impl Shared {
    fn start(&self, task: Task) {
        // SAFETY: no run is under way, so nobody reads it.
        unsafe { *self.task.0.get() = Some(task) };
        self.running.store(self.count - 1, Ordering::SeqCst);
        self.epoch.fetch_add(1, Ordering::SeqCst);
        self.start.wake_all();
    }

    fn join(&self) {
        self.finish.wait_until(|| self.running.load(Ordering::SeqCst) == 0);
        // SAFETY: the last member has finished.
        unsafe { *self.task.0.get() = None };
    }
}

/// The team.
pub(crate) struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Core of member 0, until its thread is known and pinned.
    leader_cpu: Option<usize>,
}

impl Team {
    /// Starts `count - 1` threads. Member `i` is pinned to `cpus[i % cpus.len()]` if cpus are given; member 0
    /// when it first runs.
    ///
    /// # Errors
    /// The system's, if it has no more threads or a core does not exist.
    pub(crate) fn new(count: usize, cpus: Option<&[usize]>) -> std::io::Result<Team> {
        let shared = Arc::new(Shared {
            barrier: Barrier::new(count),
            task: TaskCell(UnsafeCell::new(None)),
            epoch: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            start: Parking::new(),
            finish: Parking::new(),
            count,
        });
        let cpu = |member: usize| cpus.filter(|c| !c.is_empty()).map(|c| c[member % c.len()]);
        if let Some(cpu) = cpu(0) {
            // Member 0 is whoever calls `run` first; whether its core can be had is told now.
            std::thread::spawn(move || pin_to(cpu))
                .join()
                .map_err(|_| std::io::Error::other("pinning failed"))??;
        }
        let mut team = Team { shared, threads: Vec::with_capacity(count), leader_cpu: cpu(0) };
        for index in 1..count {
            let (shared, cpu) = (Arc::clone(&team.shared), cpu(index));
            let (report, pinned) = std::sync::mpsc::sync_channel(1);
            let body = move || {
                let result = cpu.map_or(Ok(()), pin_to);
                let failed = result.is_err();
                // The receiver waits for this one message.
                let _ = report.send(result);
                if !failed {
                    serve(&shared, index);
                }
            };
            team.threads.push(std::thread::Builder::new().name(format!("baton-step-{index}")).spawn(body)?);
            pinned.recv().map_err(std::io::Error::other)??;
        }
        Ok(team)
    }

    /// Runs `leader` here and `others` on every other thread, and returns when all are done.
    ///
    /// # Errors
    /// [`Broken`] if another member panicked; the team is of no use then.
    pub(crate) fn run<R>(
        &mut self,
        others: &(dyn Fn(Member<'_>) + Sync),
        leader: impl FnOnce(Member<'_>) -> R,
    ) -> Result<R, Broken> {
        if let Some(cpu) = self.leader_cpu.take() {
            // It could be had when the team was made. Losing it since costs speed, not results.
            let _ = pin_to(cpu);
        }
        let shared = &*self.shared;
        let member = Member { index: 0, count: shared.count, barrier: &shared.barrier };
        if shared.count == 1 {
            return Ok(leader(member));
        }
        // SAFETY: only the lifetime is forgotten. `Finish` keeps this frame, and so the closure, alive until every
        // member has left it, even if `leader` panics.
        let task: Task = unsafe { std::mem::transmute::<&(dyn Fn(Member<'_>) + Sync), Task>(others) };
        shared.start(task);
        let mut finish = Finish { shared, led: false };
        let result = leader(member);
        finish.led = true;
        drop(finish);
        shared.barrier.state().map(|()| result)
    }
}

/// Waits for the other members, however the leader leaves; frees those that wait for it if it panics.
struct Finish<'a> {
    shared: &'a Shared,
    /// The leader did its part.
    led: bool,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        if !self.led {
            self.shared.barrier.break_up();
        }
        self.shared.join();
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.start.wake_all();
        for thread in self.threads.drain(..) {
            // A member's panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn serve(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let closing = || shared.closing.load(Ordering::SeqCst);
        shared.start.wait_until(|| shared.epoch.load(Ordering::SeqCst) != seen || closing());
        if closing() {
            return;
        }
        seen = shared.epoch.load(Ordering::SeqCst);
        // SAFETY: the run that the epoch told of lasts until this member has finished.
        let task = unsafe { *shared.task.0.get() };
        if let Some(task) = task {
            let member = Member { index, count: shared.count, barrier: &shared.barrier };
            // SAFETY: `run` does not return before `running` is 0, so the closure lives.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { (*task)(member) }));
            if outcome.is_err() {
                shared.barrier.break_up();
            }
        }
        if shared.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            shared.finish.wake_all();
        }
    }
}

/// Binds the calling thread to one core.
#[cfg(target_os = "linux")]
fn pin_to(cpu: usize) -> std::io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(std::io::Error::other(format!("core {cpu} does not exist")));
    }
    // SAFETY: the set is a plain bit array, all zeros is the empty set, and `cpu` is below its size.
    let outcome = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    match outcome {
        0 => Ok(()),
        _ => {
            let cause = std::io::Error::last_os_error();
            Err(std::io::Error::new(cause.kind(), format!("can't run on core {cpu}: {cause}")))
        }
    }
}

/// Other systems have no such call; threads run where they are put.
#[cfg(not(target_os = "linux"))]
fn pin_to(_cpu: usize) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_member_runs_once_in_every_run() {
        for count in 1..=4 {
            let mut team = Team::new(count, None).unwrap();
            let calls: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            for run in 1..=200 {
                let work = |m: Member<'_>| {
                    calls[m.index()].fetch_add(1, Ordering::Relaxed);
                    m.wait().unwrap();
                    for c in &calls {
                        assert!(c.load(Ordering::Relaxed) >= run);
                    }
                };
                team.run(&work, work).unwrap();
            }
            assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 200));
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        let barrier = Barrier::new(1);
        for count in 1..9 {
            for len in 0..50 {
                let mut next = 0;
                for index in 0..count {
                    let share = Member { index, count, barrier: &barrier }.share(len);
                    assert_eq!(share.start, next);
                    assert!(share.len().abs_diff(len / count) <= 1);
                    next = share.end;
                }
                assert_eq!(next, len);
            }
        }
    }

    #[test]
    fn a_members_panic_is_an_error_and_not_a_hang() {
        let mut team = Team::new(2, None).unwrap();
        let outcome = team.run(&|_| panic!("on purpose"), |m| m.wait());
        assert_eq!(outcome, Err(Broken));
        assert_eq!(team.run(&|_| (), |m| m.wait()), Err(Broken));
    }

    #[test]
    fn the_leaders_panic_waits_for_the_others() {
        let mut team = Team::new(2, None).unwrap();
        let left = AtomicUsize::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let others = |m: Member<'_>| {
                let _ = m.wait();
                left.fetch_add(1, Ordering::SeqCst);
            };
            team.run(&others, |_| -> () { panic!("on purpose") })
        }));
        assert!(outcome.is_err());
        assert_eq!(left.load(Ordering::SeqCst), 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_core_that_does_not_exist_is_named() {
        for (count, cpus) in [(2, vec![0, 100_000]), (1, vec![100_000]), (1, vec![1000])] {
            let error = Team::new(count, Some(&cpus)).err().unwrap();
            assert!(error.to_string().contains(&cpus[cpus.len() - 1].to_string()), "{error}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn members_run_where_they_were_put() {
        // A thread of its own: the leader stays pinned.
        std::thread::spawn(|| {
            let mut team = Team::new(2, Some(&[0])).unwrap();
            // SAFETY: asks for the core that this thread runs on, touches no memory.
            let here = |_: Member<'_>| assert_eq!(unsafe { libc::sched_getcpu() }, 0);
            team.run(&here, here).unwrap();
        })
        .join()
        .unwrap();
    }
}
