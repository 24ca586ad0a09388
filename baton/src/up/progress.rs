//! A bar on the terminal while a model is fetched.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use baton_model::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Draws a bar where standard error is a terminal, and a line at each tenth elsewhere.
#[derive(Debug, Default)]
pub(crate) struct Bar(Mutex<Shown>);

#[derive(Debug, Default)]
struct Shown {
    bar: Option<ProgressBar>,
    what: String,
    total_bytes: Option<u64>,
    tenths: u64,
}

impl Bar {
    fn shown(&self) -> std::sync::MutexGuard<'_, Shown> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress for Bar {
    fn start(&self, what: &str, total_bytes: Option<u64>) {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(total_bytes, ProgressDrawTarget::stderr_with_hz(8));
            let shape = match total_bytes {
                Some(_) => "    {msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
                None => "    {msg} {spinner} {bytes} {bytes_per_sec}",
            };
            // A template that can't be read leaves the library's own.
            bar.set_style(
                ProgressStyle::with_template(shape).unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.set_message(what.to_owned());
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        if bar.is_none() {
            eprintln!("    fetching {what}");
        }
        *self.shown() = Shown { bar, what: what.to_owned(), total_bytes, tenths: 0 };
    }

    fn advance_to(&self, done_bytes: u64) {
        let mut shown = self.shown();
        if let Some(bar) = &shown.bar {
            bar.set_position(done_bytes);
            return;
        }
        let Some(total) = shown.total_bytes.filter(|total| *total > 0) else { return };
        let tenths = (done_bytes.saturating_mul(10) / total).min(10);
        if tenths > shown.tenths {
            shown.tenths = tenths;
            eprintln!("    fetching {}: {}0 %", shown.what, tenths);
        }
    }

    fn note(&self, line: &str) {
        match &self.shown().bar {
            Some(bar) => bar.println(format!("    {line}")),
            None => eprintln!("    {line}"),
        }
    }

    fn finish(&self) {
        if let Some(bar) = self.shown().bar.take() {
            bar.finish_and_clear();
        }
    }
}
