//! Log lines: text or JSON on standard error, each with its role, and with request and trace id inside a request.
//!
//! A line holds no text of prompts or completions unless the user asked for it: callers ask
//! [`content_enabled`] before they write any.

mod format;
mod request;

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::TelemetryError;

pub use request::request_span;

/// How a line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// `role time LEVEL message key=value ...`
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = TelemetryError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(TelemetryError::BadOption {
                option: "--log-format",
                value: other.to_owned(),
                expected: "text or json",
            }),
        }
    }
}

impl std::fmt::Display for LogFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// What [`init`] needs to know.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// How a line looks.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug` or `trace`; or several `target=level`, separated by commas.
    pub level: String,
    /// On every line: which process wrote it.
    pub role: String,
    /// Whether lines may hold text of prompts and completions.
    pub content: bool,
}

/// Libraries whose own debug lines would bury ours when only a level is given.
const QUIET: &str =
    "h2=warn,hyper=warn,hyper_util=warn,tower=warn,tonic=warn,mio=warn,tokio=warn,runtime=warn";

static CONTENT: AtomicBool = AtomicBool::new(false);

/// Sets up logging for this process; lines go to standard error.
///
/// # Errors
/// [`TelemetryError::BadOption`] when the level can't be read, [`TelemetryError::AlreadySet`] the second time.
pub fn init(config: LogConfig) -> Result<(), TelemetryError> {
    let filter = filter(&config.level)?;
    CONTENT.store(config.content, Ordering::Relaxed);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .fmt_fields(format::NoSpanFields)
        .event_format(format::Lines::new(config.format, config.role));
    tracing_subscriber::registry()
        .with(filter)
        .with(request::RequestIds)
        .with(lines)
        .try_init()
        .map_err(|_| TelemetryError::AlreadySet)
}

/// Whether lines may hold text of prompts and completions (`--log-content`).
pub fn content_enabled() -> bool {
    CONTENT.load(Ordering::Relaxed)
}

fn filter(level: &str) -> Result<EnvFilter, TelemetryError> {
    let bad = || TelemetryError::BadOption {
        option: "--log-level",
        value: level.to_owned(),
        expected: "error, warn, info, debug, trace, off, or target=level pairs separated by commas",
    };
    let single = !level.contains(['=', ',']);
    if single && level.parse::<tracing_subscriber::filter::LevelFilter>().is_err() {
        return Err(bad());
    }
    let directives = if single { format!("{level},{QUIET}") } else { level.to_owned() };
    // `off` stays off for the quiet libraries too.
    let directives = if level == "off" { level.to_owned() } else { directives };
    EnvFilter::try_new(directives).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_or_refused_by_name() {
        for good in ["info", "debug", "off", "baton_router=debug,info"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        let error = filter("loud").expect_err("no such level").to_string();
        assert!(error.contains("--log-level") && error.contains("loud"), "{error}");
    }

    #[test]
    fn formats_round_trip() {
        for format in [LogFormat::Text, LogFormat::Json] {
            assert_eq!(format.to_string().parse::<LogFormat>().ok(), Some(format));
        }
        assert!("xml".parse::<LogFormat>().is_err());
    }
}
