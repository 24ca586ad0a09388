//! The checklist that `up` prints: one line a phase, with what came out and how long it took.

use std::io::{IsTerminal, Write};
use std::time::Instant;

/// Prints phases on standard output.
#[derive(Debug)]
pub(super) struct Checklist {
    began: Instant,
    phase: Instant,
}

impl Checklist {
    /// Prints the heading.
    pub(super) fn new(heading: &str) -> Self {
        line(heading);
        let now = Instant::now();
        Self { began: now, phase: now }
    }

    /// A phase is done; it began when the one before it was.
    pub(super) fn done(&mut self, phase: &str, outcome: &str) {
        let seconds = self.phase.elapsed().as_secs_f64();
        let mark = if std::io::stdout().is_terminal() { "\x1b[32m✓\x1b[0m" } else { "✓" };
        line(&format!("  {mark} {phase:<10}{seconds:>6.1} s  {outcome}"));
        self.phase = Instant::now();
    }

    /// Something chosen that the user may want to know.
    pub(super) fn detail(&self, text: &str) {
        line(&format!("    {:<10}{:>6}    {text}", "", ""));
    }

    /// Seconds since the heading.
    pub(super) fn total_seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}

/// Prints a line at once, also into a pipe. A closed pipe is no reason to stop serving.
pub(super) fn line(text: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}
