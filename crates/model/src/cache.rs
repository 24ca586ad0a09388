//! The user's cache folder: where it is, and one process at a time in it.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use crate::{ModelError, Progress};

/// Where models are kept: `$BATON_CACHE`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`, else a folder `baton`
/// under the system's temporary folder.
pub fn default_cache_dir() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("BATON_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("baton")))
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache").join("baton")))
        .unwrap_or_else(|| std::env::temp_dir().join("baton"))
}

/// Holds a lock file; the system drops the lock with the process, however it ends.
pub(crate) struct CacheLock {
    _file: File,
}

impl CacheLock {
    /// Takes the lock beside `target` (its name and `.lock`), waiting for another process that holds it. The lock
    /// file stays: removing it would let two processes hold locks on two files of one name.
    pub(crate) fn take(target: &Path, progress: &dyn Progress) -> Result<CacheLock, ModelError> {
        let path = with_suffix(target, ".lock");
        create_parent(&path)?;
        let file = File::create(&path).map_err(ModelError::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => return Ok(CacheLock { _file: file }),
            Err(TryLockError::WouldBlock) => {
                progress.note(&format!("waiting for another process that is fetching {}", file_name(target)));
            }
            Err(TryLockError::Error(error)) => return Err(ModelError::io("lock", &path)(error)),
        }
        file.lock().map_err(ModelError::io("lock", &path))?;
        Ok(CacheLock { _file: file })
    }
}

pub(crate) fn create_parent(path: &Path) -> Result<(), ModelError> {
    match path.parent() {
        Some(parent) => std::fs::create_dir_all(parent).map_err(ModelError::io("create", parent)),
        None => Ok(()),
    }
}

/// `path` with `suffix` after its last character.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The last part of a path, for messages.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Moves a finished file to its place. Its bytes are on disk before its name is, so that a crash can't leave a name
/// without its bytes.
pub(crate) fn publish(finished: &Path, target: &Path) -> Result<(), ModelError> {
    let file = File::open(finished).map_err(ModelError::io("open", finished))?;
    file.sync_all().map_err(ModelError::io("write", finished))?;
    std::fs::rename(finished, target).map_err(ModelError::io("create", target))
}
