//! What the children print, line by line, each with the name of its process before it.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

/// Longest piece shown as one line, in bytes.
const MAX_LINE_BYTES: usize = 16 << 10;
/// Lines kept of each process, to be shown when it can't be started.
const KEPT_LINES: usize = 20;

/// The last lines of one process; shared by the two tasks that read its pipes.
#[derive(Debug, Clone, Default)]
pub(super) struct LastLines(Arc<Mutex<VecDeque<String>>>);

impl LastLines {
    fn push(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }

    /// Oldest first.
    pub(super) fn all(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// How a process's lines begin.
#[derive(Debug, Clone)]
pub(super) struct Prefix(String);

impl Prefix {
    /// `[prefill-0] `; in colour `nth` when standard error is a terminal.
    pub(super) fn new(name: &str, nth: usize) -> Self {
        const COLOURS: [u8; 6] = [36, 32, 35, 33, 34, 31];
        if !std::io::stderr().is_terminal() {
            return Self(format!("[{name}] "));
        }
        let colour = COLOURS.get(nth % COLOURS.len()).copied().unwrap_or(0);
        Self(format!("\x1b[{colour}m[{name}]\x1b[0m "))
    }
}

/// Copies a pipe's lines to standard error until it closes.
pub(super) async fn copy_lines(pipe: impl AsyncRead + Unpin, prefix: Prefix, last: LastLines) {
    copy_lines_to(std::io::stderr(), pipe, &prefix, &last).await;
}

async fn copy_lines_to(mut out: impl Write, pipe: impl AsyncRead + Unpin, prefix: &Prefix, last: &LastLines) {
    let mut reader = BufReader::with_capacity(MAX_LINE_BYTES, pipe);
    let mut line = Vec::new();
    loop {
        let (used, complete) = match reader.fill_buf().await {
            Ok([]) | Err(_) => break,
            Ok(bytes) => match bytes.iter().position(|byte| *byte == b'\n') {
                Some(end) => {
                    line.extend_from_slice(bytes.get(..end).unwrap_or(bytes));
                    (end + 1, true)
                }
                None => {
                    line.extend_from_slice(bytes);
                    (bytes.len(), line.len() >= MAX_LINE_BYTES)
                }
            },
        };
        reader.consume(used);
        if complete {
            show(&mut out, &line, prefix, last);
            line.clear();
        }
    }
    if !line.is_empty() {
        show(&mut out, &line, prefix, last);
    }
}

fn show(out: &mut impl Write, line: &[u8], prefix: &Prefix, last: &LastLines) {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_end();
    last.push(text);
    // One write a line, so that lines of two processes never mix. A closed terminal is no reason to stop serving.
    let _ = out.write_all(format!("{}{text}\n", prefix.0).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_cut_at_their_ends_and_the_last_ones_are_kept() {
        let mut text: String = (0..30).map(|n| format!("line {n}\r\n")).collect();
        text.push_str("no end");
        let (last, mut shown) = (LastLines::default(), Vec::new());
        copy_lines_to(&mut shown, text.as_bytes(), &Prefix::new("x-0", 0), &last).await;
        let shown = String::from_utf8(shown).unwrap();
        assert_eq!(shown.lines().count(), 31);
        assert!(shown.lines().all(|line| line.contains("[x-0]") && line.contains(' ')), "{shown}");
        let lines = last.all();
        assert_eq!(lines.len(), KEPT_LINES);
        assert_eq!((lines[0].as_str(), lines[19].as_str()), ("line 11", "no end"));
    }

    #[tokio::test]
    async fn an_endless_line_is_shown_in_pieces() {
        let text = vec![b'x'; 3 * MAX_LINE_BYTES + 5];
        let last = LastLines::default();
        copy_lines_to(std::io::sink(), text.as_slice(), &Prefix::new("x-0", 0), &last).await;
        let lengths: Vec<usize> = last.all().iter().map(String::len).collect();
        assert_eq!(lengths.iter().sum::<usize>(), text.len());
        assert!(lengths.iter().all(|length| *length < 2 * MAX_LINE_BYTES));
    }
}
