//! Where generated text must end.

use crate::TextError;

/// Watches a generation's text for stop strings and holds back what could be the start of one.
///
/// The text ends at the first position at which any stop string is complete; of several that are complete there the
/// longest counts. That does not depend on how the text was cut into pieces. No part of the stop string that ends the
/// text is ever returned. All cuts fall between characters, since a stop string begins and ends at one. A call costs
/// time in proportion to the piece and the number of stop strings, not to the text so far.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<Stop>,
    /// Text not yet returned: the longest end of the text that is the start of a stop string.
    held: String,
    matched: bool,
}

/// What one piece of text brought.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopStep {
    /// Text that may be delivered; can be empty.
    pub text: String,
    /// Set once, when a stop string was completed: the text ends with `text`.
    pub matched: Option<StopMatch>,
}

/// Which stop string ended the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopMatch {
    /// Index in the list given to [`StopStrings::new`].
    pub index: usize,
}

/// One stop string and how far the end of the text agrees with it (Knuth, Morris, Pratt 1977, on bytes).
#[derive(Debug, Clone)]
struct Stop {
    bytes: Vec<u8>,
    /// `borders[n]` is the length of the longest proper border of the first `n + 1` bytes.
    borders: Vec<usize>,
    agreed: usize,
}

impl Stop {
    fn new(text: &str) -> Stop {
        let bytes = text.as_bytes().to_vec();
        let mut stop = Stop { borders: vec![0; bytes.len()], bytes, agreed: 0 };
        let mut border = 0;
        for end in 1..stop.bytes.len() {
            border = stop.longest_agreeing(border, stop.bytes[end]);
            stop.borders[end] = border;
        }
        stop
    }

    /// From `agreed` bytes in agreement, how many there are after one more `byte`. `agreed` is below the length.
    fn longest_agreeing(&self, mut agreed: usize, byte: u8) -> usize {
        while self.bytes[agreed] != byte {
            if agreed == 0 {
                return 0;
            }
            agreed = self.borders[agreed - 1];
        }
        agreed + 1
    }

    /// Takes the next byte of the text; true when the string is complete. Not called again after that.
    fn advance(&mut self, byte: u8) -> bool {
        self.agreed = self.longest_agreeing(self.agreed, byte);
        self.agreed == self.bytes.len()
    }
}

impl StopStrings {
    /// Watches for these strings; none is fine.
    ///
    /// # Errors
    /// [`TextError::EmptyStop`].
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<StopStrings, TextError> {
        if stops.iter().any(|stop| stop.as_ref().is_empty()) {
            return Err(TextError::EmptyStop);
        }
        let stops = stops.iter().map(|stop| Stop::new(stop.as_ref())).collect();
        Ok(StopStrings { stops, held: String::new(), matched: false })
    }

    /// Takes the next piece of text. After a match everything is swallowed.
    pub fn push(&mut self, piece: &str) -> StopStep {
        if self.matched {
            return StopStep::default();
        }
        for (index, byte) in piece.bytes().enumerate() {
            if let Some(found) = self.advance(byte) {
                let stop_bytes = self.stops[found.index].bytes.len();
                let mut text = std::mem::take(&mut self.held);
                // A match ends between characters, so `index + 1` and the cut are boundaries.
                text.push_str(piece.get(..=index).unwrap_or_default());
                text.truncate(text.len().saturating_sub(stop_bytes));
                self.matched = true;
                return StopStep { text, matched: Some(found) };
            }
        }
        self.held.push_str(piece);
        let held_bytes = self.stops.iter().map(|stop| stop.agreed).max().unwrap_or(0);
        let keep = self.held.split_off(self.held.len() - held_bytes);
        StopStep { text: std::mem::replace(&mut self.held, keep), matched: None }
    }

    /// Ends the text without a match: returns what was held back.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string was completed.
    pub fn is_matched(&self) -> bool {
        self.matched
    }

    fn advance(&mut self, byte: u8) -> Option<StopMatch> {
        let mut found: Option<(usize, usize)> = None;
        for (index, stop) in self.stops.iter_mut().enumerate() {
            let complete = stop.advance(byte);
            if complete && found.is_none_or(|(_, longest)| stop.bytes.len() > longest) {
                found = Some((index, stop.bytes.len()));
            }
        }
        found.map(|(index, _)| StopMatch { index })
    }
}
