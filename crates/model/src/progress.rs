//! How a fetch tells its caller how far it is.

/// Hears about a fetch. Implementations draw a bar, log lines, or nothing; they must return quickly.
pub trait Progress: Send + Sync {
    /// A fetch begins. `total_bytes` is its size where known.
    fn start(&self, what: &str, total_bytes: Option<u64>);
    /// So many bytes are here; may go back when a fetch has to restart.
    fn advance_to(&self, done_bytes: u64);
    /// A remark for the user, such as a wait for another process.
    fn note(&self, line: &str);
    /// The fetch begun last has ended, well or not.
    fn finish(&self);
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn start(&self, _what: &str, _total_bytes: Option<u64>) {}
    fn advance_to(&self, _done_bytes: u64) {}
    fn note(&self, _line: &str) {}
    fn finish(&self) {}
}
