//! Owns what Baton says about itself: the format of its log lines, its metrics, and every literal name of a
//! span, attribute or metric.
//!
//! Must never know what a request, a block or a handoff does, and never fails or slows one: callers hand in
//! plain numbers and names.

pub mod log;
pub mod metrics;
pub mod names;
pub mod scrape;
mod stall_cause;
pub mod trace;

pub use stall_cause::StallCause;

/// What can go wrong while telemetry is set up; nothing can go wrong later.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// Tell the user: the option's value can't be read.
    #[error("{option}: {value:?} is not {expected}")]
    BadOption {
        /// The option, as the user wrote it.
        option: &'static str,
        /// Its value.
        value: String,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// A programming error of the caller: logging was set up twice in one process.
    #[error("logging is already set up in this process")]
    AlreadySet,
    /// Tell the user: spans can't be written there.
    #[error("can't write spans to {}: {source}", path.display())]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Tell the user: spans can't be exported.
    #[error("can't set up the export of spans: {0}")]
    Exporter(String),
}
