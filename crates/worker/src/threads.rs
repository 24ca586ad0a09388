//! The threads beside the step team: one for requests and control, one for KV in bulk.

use tokio::runtime::{Builder, Handle, Runtime};

use crate::WorkerError;
use crate::cpus::{CpuList, Turns, settle_current_thread};

/// How much each kind of thread gives way to others, 0 to 19.
#[derive(Clone, Copy, Debug, Default)]
pub struct Niceness {
    /// The step thread and the engine's team.
    pub step: i32,
    /// The bulk thread.
    pub bulk: i32,
}

/// The runtimes of one worker; dropping them drops every task and connection at once.
pub(crate) struct Threads {
    io: Background,
    bulk: Background,
}

impl Threads {
    pub(crate) fn start(cpus: Option<&CpuList>, bulk_nice: i32) -> Result<Self, WorkerError> {
        Ok(Self {
            io: Background::new(runtime("io", cpus, 0)?),
            bulk: Background::new(runtime("bulk", cpus, bulk_nice)?),
        })
    }

    pub(crate) fn io(&self) -> &Handle {
        &self.io.handle
    }

    pub(crate) fn bulk(&self) -> &Handle {
        &self.bulk.handle
    }
}

struct Background {
    handle: Handle,
    runtime: Option<Runtime>,
}

impl Background {
    fn new(runtime: Runtime) -> Self {
        Self { handle: runtime.handle().clone(), runtime: Some(runtime) }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // In the background: this may run inside another runtime, where waiting is not allowed.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn runtime(name: &'static str, cpus: Option<&CpuList>, nice: i32) -> Result<Runtime, WorkerError> {
    let cpus = cpus.cloned();
    let settle = move || {
        settle_current_thread(name, cpus.as_ref(), nice);
        if nice == 0
            && let Err(error) = Turns::Short.take()
        {
            tracing::debug!(%error, "the {name} thread can't be given short turns");
        }
    };
    Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(4)
        .thread_name(name)
        .on_thread_start(settle)
        .enable_all()
        .build()
        .map_err(WorkerError::system(format!("start the {name} thread")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_bulk_thread_is_nice() {
        let threads = Threads::start(None, 7).unwrap();
        // SAFETY: plain system call without pointers; 0 means the calling thread.
        let nice = || std::future::ready(unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) });
        let (report, reports) = std::sync::mpsc::sync_channel(2);
        for runtime in [threads.io(), threads.bulk()] {
            let report = report.clone();
            runtime.spawn(async move { report.send(nice().await) });
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let (io, bulk) = (reports.recv().unwrap(), reports.recv().unwrap());
        assert!(io < 7, "{io}");
        assert_eq!(bulk, 7);
    }

    #[tokio::test]
    async fn dropping_runtimes_inside_another_runtime_does_not_panic() {
        drop(Threads::start(None, 0).unwrap());
    }
}
