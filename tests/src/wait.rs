//! Waiting with a bound, and one heavy test at a time.

use std::fs::File;
use std::time::{Duration, Instant};

/// The right to load the machine: one at a time over all test processes, since there may be only two cores.
pub struct Turn {
    _file: File,
}

impl Turn {
    /// Waits for the right. Held until dropped; the system drops it with the process.
    ///
    /// # Panics
    /// When the lock file can't be made.
    pub fn take() -> Self {
        let path = crate::binary::target_dir().join("baton-tests.lock");
        let file =
            File::create(&path).unwrap_or_else(|error| panic!("can't create {}: {error}", path.display()));
        file.lock().unwrap_or_else(|error| panic!("can't lock {}: {error}", path.display()));
        Self { _file: file }
    }
}

/// Probes every 20 ms until it says `Ok`.
///
/// # Panics
/// After `bound`, with `what` and the last `Err`.
pub async fn eventually<T>(
    what: &str,
    bound: Duration,
    mut probe: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    let start = Instant::now();
    loop {
        let last = match probe().await {
            Ok(value) => return value,
            Err(last) => last,
        };
        assert!(start.elapsed() < bound, "not within {bound:?}: {what}; last seen: {last}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
