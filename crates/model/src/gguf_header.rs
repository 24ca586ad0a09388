//! Reading a GGUF header with candle, and saying more than candle does about what it refuses.

use std::io::{Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use candle_core::quantized::gguf_file::Content;

use crate::ModelError;
use crate::gguf::supported_types;

/// Names of GGML's types that candle does not know, by their numbers.
const OTHER_TYPES: [(u32, &str); 18] = [
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// The header of the file at `path`, whose bytes are `bytes`.
pub(crate) fn read_header(path: &Path, bytes: &[u8]) -> Result<Content, ModelError> {
    if bytes.is_empty() {
        return Err(ModelError::corrupt(path, "the file is empty"));
    }
    if !bytes.starts_with(b"GGUF") {
        return Err(ModelError::corrupt(path, "not a GGUF file (it does not start with 'GGUF')"));
    }
    let mut reader = HeaderReader {
        inner: Cursor::new(bytes),
        state: AlignmentKey::Elsewhere,
        promised: None,
        last_text: 0..0,
    };
    Content::read(&mut reader).map_err(|error| {
        // candle's errors may carry a backtrace below the first line.
        let text = error.to_string();
        let reason = text.lines().next().unwrap_or_default();
        if reason.contains("unknown dtype") {
            // The name stands right before the type.
            let name = bytes.get(reader.last_text.clone()).unwrap_or_default();
            let name = String::from_utf8_lossy(name);
            let what =
                format!("tensor '{name}' has {}; supported weights: {}", type_in(reason), supported_types());
            ModelError::unsupported(path, what)
        } else if reason.contains("fill whole buffer") {
            ModelError::corrupt(path, "truncated: the file ends within its header")
        } else {
            ModelError::corrupt(path, format!("damaged header: {reason}"))
        }
    })
}

/// The type in candle's message, which ends with its number.
fn type_in(reason: &str) -> String {
    let number: Option<u32> = reason.rsplit(' ').next().and_then(|last| last.parse().ok());
    let known = OTHER_TYPES.iter().find(|(known, _)| Some(*known) == number);
    match (known, number) {
        (Some((_, name)), _) => format!("type {name}"),
        (None, Some(number)) => format!("a type of number {number}"),
        (None, None) => format!("a type that is not known ({reason})"),
    }
}

/// Where [`HeaderReader`] is relative to the alignment's key in the metadata.
#[derive(Clone, Copy)]
enum AlignmentKey {
    Elsewhere,
    /// The key has just been read: a type follows.
    Type,
    /// The type has been read: the value follows.
    Value,
}

/// Refuses an alignment of zero, by which candle's reader would divide, and remembers the last string. The reader
/// asks for each string and number in a read of its own: the one after `general.alignment` and its type is the value,
/// and a string is a read as long as the number before it said.
struct HeaderReader<'a> {
    inner: Cursor<&'a [u8]>,
    state: AlignmentKey,
    /// The number just read, if it was of eight bytes.
    promised: Option<u64>,
    /// Where the last string lies. A size of 4 or 8 before a number looks like one, but has bytes that no name has.
    last_text: Range<usize>,
}

impl Read for HeaderReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let start = usize::try_from(self.inner.position()).unwrap_or(usize::MAX);
        let len = self.inner.read(buf)?;
        let got = buf.get(..len).unwrap_or_default();
        if self.promised == Some(len as u64) && got.iter().all(|byte| byte.is_ascii_graphic()) {
            self.last_text = start..start.saturating_add(len);
        }
        self.promised = got.try_into().ok().map(u64::from_le_bytes);
        self.state = match self.state {
            // Keys are compared as the reader compares them: without trailing zeros.
            AlignmentKey::Elsewhere if trim_zeros(got) == b"general.alignment" => AlignmentKey::Type,
            AlignmentKey::Elsewhere => AlignmentKey::Elsewhere,
            AlignmentKey::Type => AlignmentKey::Value,
            AlignmentKey::Value if got.iter().all(|&byte| byte == 0) => {
                return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "general.alignment is 0"));
            }
            AlignmentKey::Value => AlignmentKey::Elsewhere,
        };
        Ok(len)
    }
}

impl Seek for HeaderReader<'_> {
    fn seek(&mut self, pos: SeekFrom) -> std::io::Result<u64> {
        self.inner.seek(pos)
    }
}

fn trim_zeros(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    bytes.get(..end).unwrap_or_default()
}
