//! What is logged on a test's thread, where its router runs.

use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Metadata, Subscriber};

/// The lines so far; recording ends when it is dropped.
pub(crate) struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    _guard: DefaultGuard,
}

struct Recorder {
    lines: Arc<Mutex<Vec<String>>>,
    next_span: AtomicU64,
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(self.next_span.fetch_add(1, Ordering::Relaxed))
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.lines.lock().expect("unpoisoned").push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Log {
    pub(crate) fn record() -> Self {
        let lines = Arc::default();
        let recorder = Recorder { lines: Arc::clone(&lines), next_span: AtomicU64::new(1) };
        Self { lines, _guard: tracing::subscriber::set_default(recorder) }
    }

    /// Those that have all these words.
    pub(crate) fn lines(&self, words: &[&str]) -> Vec<String> {
        let has_all = |line: &&String| words.iter().all(|word| line.contains(word));
        self.lines.lock().expect("unpoisoned").iter().filter(has_all).cloned().collect()
    }
}
