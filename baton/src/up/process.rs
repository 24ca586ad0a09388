//! Starting a child that can't outlive this process, and ending it.

use std::ffi::OsString;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};

/// What to run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Launch {
    /// Arguments after the program's name.
    pub(crate) arguments: Vec<OsString>,
    /// Environment variables besides this process's own.
    pub(crate) environment: Vec<(&'static str, String)>,
    /// CPUs the whole process is bound to; empty for no bound.
    pub(crate) cpus: Vec<usize>,
}

/// Starts this very executable again. Standard input is empty; output comes through pipes. The child is in a process
/// group of its own, so that a Ctrl-C in the terminal reaches only this process, which then stops its children in
/// order. However this process ends, the child is killed.
///
/// Must be called from the thread that lives as long as the process: on Linux the child dies with the *thread* that
/// started it.
///
/// # Errors
/// The system's.
pub(crate) fn start(launch: &Launch) -> io::Result<Child> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.args(&launch.arguments).envs(launch.environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("BATON_PARENT_PID", std::process::id().to_string());
    command.process_group(0).kill_on_drop(true);
    #[cfg(target_os = "linux")]
    bind_to_parent(&mut command, &launch.cpus);
    command.spawn()
}

/// Has the kernel kill the child when this thread ends, and binds the child to its CPUs.
#[cfg(target_os = "linux")]
fn bind_to_parent(command: &mut Command, cpus: &[usize]) {
    let parent = std::process::id();
    // SAFETY: `cpu_set_t` is a plain bit array for which all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let mut bound = false;
    for cpu in cpus.iter().copied().filter(|cpu| *cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: the number is below `CPU_SETSIZE`, the capacity of the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
        bound = true;
    }
    let prepare = move || {
        // SAFETY: plain system call without pointers.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // The parent may have died between the fork and the call above; then the signal never comes.
        if std::os::unix::process::parent_id() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if bound {
            // SAFETY: `set` is valid for reads of the size given; 0 means the calling thread, the only one after a
            // fork. Failing only costs isolation, so the result does not matter.
            unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes only async-signal-safe system calls, allocates nothing and
    // takes no lock.
    unsafe { command.pre_exec(prepare) };
}

/// Asks the child to end (SIGTERM) and kills it when it has not done so after `patience`, or at once when `now`
/// becomes ready.
pub(crate) async fn stop(child: &mut Child, patience: Duration, now: impl Future<Output = ()>) {
    if let Some(pid) = child.id().and_then(|pid| libc::pid_t::try_from(pid).ok()) {
        // SAFETY: plain system call without pointers; the child was not waited for yet, so the number is still its own.
        unsafe { libc::kill(pid, libc::SIGTERM) };
    }
    tokio::select! {
        _ = child.wait() => return,
        () = tokio::time::sleep(patience) => {}
        () = now => {}
    }
    // An error means that it has ended meanwhile.
    let _ = child.kill().await;
}

/// How a child ended, for a person.
pub(crate) fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::Instant;

    use tokio::io::{AsyncBufReadExt, BufReader};

    use super::*;

    /// Not a test of anything when run with the others: the child of the one below, which is this test program again.
    #[test]
    fn child_that_waits() {
        if std::env::var_os("BATON_PARENT_PID").is_some() {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let cpus = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap();
            println!("{cpus}");
            std::thread::sleep(Duration::from_secs(60));
        }
    }

    #[tokio::test]
    async fn a_child_is_bound_to_its_cpus_and_ends_when_asked() {
        let cpu = baton_worker::CpuList::allowed().unwrap().as_slice()[0];
        let arguments =
            ["up::process::tests::child_that_waits", "--exact", "--nocapture"].map(OsString::from).to_vec();
        let mut child = start(&Launch { arguments, cpus: vec![cpu], ..Launch::default() }).unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let cpus = loop {
            let line = lines.next_line().await.unwrap().unwrap();
            if let Some((_, cpus)) = line.split_once("Cpus_allowed_list:") {
                break cpus.trim().to_owned();
            }
        };
        assert_eq!(cpus, cpu.to_string());
        let begun = Instant::now();
        stop(&mut child, Duration::from_secs(10), std::future::pending()).await;
        assert!(begun.elapsed() < Duration::from_secs(5));
        let status = child.wait().await.unwrap();
        assert_eq!(describe(status), "was ended by signal 15");
    }
}
