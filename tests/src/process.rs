//! One process of `baton`: started, signalled, ended by its id, its log kept.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How much of a log a failed test prints.
const TAIL_LINES: usize = 80;

/// A folder for logs and address files; removed at the end unless a test failed or `BATON_TEST_KEEP` is set.
pub struct LogDir {
    dir: Option<tempfile::TempDir>,
}

impl LogDir {
    /// A new folder below the target folder.
    ///
    /// # Panics
    /// When it can't be made.
    pub fn new() -> Self {
        let parent = crate::binary::target_dir().join("baton-tests");
        std::fs::create_dir_all(&parent).expect("the target folder is writable");
        let dir = tempfile::Builder::new().prefix("cluster-").tempdir_in(parent).expect("a folder for logs");
        Self { dir: Some(dir) }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.as_ref().expect("present until dropped").path()
    }

    fn print_tails(&self) {
        let Ok(entries) = std::fs::read_dir(self.path()) else { return };
        let mut logs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        logs.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
        logs.sort();
        for log in logs {
            let text = String::from_utf8_lossy(&std::fs::read(&log).unwrap_or_default()).into_owned();
            let lines: Vec<&str> = text.lines().collect();
            eprintln!("---- {} ({} lines)", log.display(), lines.len());
            for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
                eprintln!("{line}");
            }
        }
    }
}

impl Default for LogDir {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for LogDir {
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        if failed {
            self.print_tails();
        }
        if (failed || std::env::var_os("BATON_TEST_KEEP").is_some())
            && let Some(dir) = self.dir.take()
        {
            eprintln!("logs kept in {}", dir.keep().display());
        }
    }
}

/// A running `baton`; dropping it kills it and what it started, and waits until all are gone.
pub struct Process {
    /// What it is called in messages, and its log's name.
    pub name: String,
    child: Child,
    log: PathBuf,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts the binary under test with `args`; both outputs go to `NAME.log` in `dir`, appended.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn start(name: &str, dir: &Path, args: &[String], env: &[(&str, &str)]) -> Self {
        Self::start_with(&[], name, dir, args, env)
    }

    /// As [`Process::start`], with a command line before the binary that ends in running it in its own place.
    ///
    /// # Panics
    /// As [`Process::start`].
    pub fn start_with(
        prefix: &[String],
        name: &str,
        dir: &Path,
        args: &[String],
        env: &[(&str, &str)],
    ) -> Self {
        let binary = crate::binary::baton();
        let mut command = match prefix.split_first() {
            None => Command::new(binary),
            Some((program, rest)) => {
                let mut command = Command::new(program);
                command.args(rest).arg(binary);
                command
            }
        };
        command.args(args);
        // The caller's own settings must not reach the process under test.
        let ours = |key: &str| key.starts_with("OTEL_") || key.starts_with("BATON_") && key != "BATON_CACHE";
        for (key, _) in std::env::vars_os().filter(|(key, _)| ours(&key.to_string_lossy())) {
            command.env_remove(key);
        }
        command.envs(env.iter().copied());
        Self::spawn(command, name, dir)
    }

    /// As [`Process::start`], of another program than `baton`.
    ///
    /// # Panics
    /// As [`Process::start`].
    pub fn start_program(program: &Path, name: &str, dir: &Path, args: &[String]) -> Self {
        let mut command = Command::new(program);
        command.args(args);
        Self::spawn(command, name, dir)
    }

    fn spawn(mut command: Command, name: &str, dir: &Path) -> Self {
        let log = dir.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log).expect("the log folder is writable");
        let err = out.try_clone().expect("a file handle");
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        die_with_parent(&mut command);
        let child = command.spawn().unwrap_or_else(|error| panic!("can't start {name}: {error}"));
        Self { name: name.to_owned(), child, log, status: None }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it printed so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// How it ended; `None` while it runs.
    pub fn try_status(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("a child can be waited for");
        }
        self.status
    }

    /// Waits until it ended.
    ///
    /// # Panics
    /// When it still runs after `bound`; prints what it said.
    pub fn wait(&mut self, bound: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.try_status() {
                return status;
            }
            assert!(start.elapsed() < bound, "{} still runs after {bound:?}:\n{}", self.name, self.output());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until it ended by itself, and gives its exit code; minus the signal's number if a signal ended it.
    ///
    /// # Panics
    /// As [`Process::wait`].
    pub fn exit_code(&mut self, bound: Duration) -> i32 {
        let status = self.wait(bound);
        status.code().unwrap_or_else(|| -status.signal().unwrap_or(0))
    }

    /// Sends a signal (`libc::SIGTERM`, `SIGINT`, `SIGSTOP`, ...); nothing when it has ended.
    pub fn signal(&mut self, signal: i32) {
        if self.try_status().is_none() {
            send_signal(self.pid(), signal);
        }
    }

    /// `kill -9`, and waits until the kernel has taken it away.
    pub fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        self.wait(Duration::from_secs(10));
    }

    /// Memory it has in RAM; 0 when it has ended.
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        kib.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    }

    /// Everything below it in the process table.
    pub fn descendants(&self) -> Vec<u32> {
        descendants(self.pid())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let below = self.descendants();
        self.kill();
        for &pid in &below {
            send_signal(pid, libc::SIGKILL);
        }
        let start = Instant::now();
        while below.iter().any(|&pid| is_alive(pid)) {
            if start.elapsed() > Duration::from_secs(5) {
                // A second panic would abort the test run and hide the first.
                assert!(std::thread::panicking(), "{} left processes behind: {below:?}", self.name);
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The kernel kills the child when the thread that started it ends, so that an aborted test run leaves nothing.
fn die_with_parent(command: &mut Command) {
    // SAFETY: between fork and exec only one system call is made, which is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| {
            #[cfg(target_os = "linux")]
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// `kill -9` of a process that a [`Process`] started.
pub fn kill(pid: u32) {
    send_signal(pid, libc::SIGKILL);
}

fn send_signal(pid: u32, signal: i32) {
    let Ok(pid) = i32::try_from(pid) else { return };
    // SAFETY: kill takes two integers and touches no memory of this process.
    unsafe {
        libc::kill(pid, signal);
    }
}

/// Whether a process runs; a zombie does not.
pub fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit_once(')').map(|(_, rest)| !rest.trim_start().starts_with('Z')))
        .unwrap_or(false)
}

/// Everything below `pid` in the process table.
pub fn descendants(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut open = vec![pid];
    while let Some(parent) = open.pop() {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{parent}/task")) else { continue };
        for thread in threads.flatten() {
            let children = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            let pids: Vec<u32> = children.split_whitespace().filter_map(|text| text.parse().ok()).collect();
            found.extend(&pids);
            open.extend(&pids);
        }
    }
    found
}
