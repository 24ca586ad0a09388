//! One safetensors file mapped into memory: eight bytes of header length, a JSON header, the tensors.
//!
//! The header is read here rather than by the `safetensors` crate because a refusal has to name the tensor and its
//! type, and a name given twice has to be seen.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::mapped::{let_go, map_file};
use crate::tensors::Entry;
use crate::{ModelError, WeightType};

/// Largest header accepted; the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: usize = 8;

/// The mapped file and its table of tensors, under the file's own names.
pub(crate) struct SafetensorsFile {
    path: PathBuf,
    map: Mmap,
    header_bytes: usize,
    entries: HashMap<String, Entry>,
}

impl SafetensorsFile {
    pub(crate) fn open(path: &Path) -> Result<SafetensorsFile, ModelError> {
        let map = map_file(path)?;
        let header = header(path, &map)?;
        let header_bytes = LENGTH_BYTES + header.len();
        let Header(listed) = serde_json::from_slice(header)
            .map_err(|error| ModelError::corrupt(path, format!("damaged header: {error}")))?;
        check_layout(path, &listed, (map.len() - header_bytes) as u64)?;
        let mut entries = HashMap::with_capacity(listed.len());
        for (name, raw) in listed {
            let entry = entry(path, &name, &raw, header_bytes)?;
            entries.insert(name, entry);
        }
        Ok(SafetensorsFile { path: path.to_owned(), map, header_bytes, entries })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The length and the JSON.
    pub(crate) fn header(&self) -> &[u8] {
        self.map.get(..self.header_bytes).unwrap_or_default()
    }

    pub(crate) fn file_bytes(&self) -> usize {
        self.map.len()
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// The bytes of one of this file's entries.
    pub(crate) fn bytes(&self, entry: &Entry) -> Result<&[u8], ModelError> {
        entry
            .bytes(&self.map)
            .ok_or_else(|| ModelError::corrupt(&self.path, "a tensor lies outside the file"))
    }

    /// Of one of this file's entries.
    pub(crate) fn let_go(&self, entry: &Entry) {
        let_go(&self.map, entry);
    }
}

/// The JSON of the header, by the length before it.
fn header<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a [u8], ModelError> {
    let corrupt = |reason: String| ModelError::corrupt(path, reason);
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(corrupt(format!("{} bytes are no safetensors file", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        let reason =
            format!("not a safetensors file: a header of {length} bytes, the limit is {MAX_HEADER_BYTES}");
        return Err(corrupt(reason));
    }
    usize::try_from(length).ok().and_then(|length| rest.get(..length)).ok_or_else(|| {
        corrupt(format!("truncated: a header of {length} bytes in a file of {} bytes", bytes.len()))
    })
}

/// A tensor as the header describes it. `data_offsets` count from the end of the header.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Every tensor listed, in the header's order; no name twice.
struct Header(Vec<(String, RawTensor)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut seen = HashSet::new();
        let mut listed = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(de::Error::custom(format!("'{}' is listed twice", printable(&name))));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let raw = map
                .next_value()
                .map_err(|error| de::Error::custom(format!("tensor '{}': {error}", printable(&name))))?;
            listed.push((name, raw));
        }
        Ok(Header(listed))
    }
}

/// A name from a file as it can stand in a one-line message.
fn printable(name: &str) -> String {
    name.chars().take(200).flat_map(char::escape_debug).collect()
}

/// The tensors cover the data once and wholly, as the format demands: no overlap, no hole, nothing outside.
fn check_layout(path: &Path, listed: &[(String, RawTensor)], data_bytes: u64) -> Result<(), ModelError> {
    let corrupt = |reason: String| Err(ModelError::corrupt(path, reason));
    let mut by_start: Vec<(&str, u64, u64)> =
        listed.iter().map(|(name, raw)| (name.as_str(), raw.data_offsets.0, raw.data_offsets.1)).collect();
    by_start.sort_by_key(|&(_, start, end)| (start, end));
    let mut covered = 0;
    let mut before = "";
    for (name, start, end) in by_start {
        let quoted = printable(name);
        if start > end {
            return corrupt(format!("tensor '{quoted}' ends at byte {end}, before its start at {start}"));
        }
        if end > data_bytes {
            return corrupt(format!(
                "tensor '{quoted}' lies outside the file (it ends at byte {end} of {data_bytes}): truncated or damaged"
            ));
        }
        if start < covered {
            return corrupt(format!("tensors '{}' and '{quoted}' overlap", printable(before)));
        }
        if start > covered {
            return corrupt(format!("{} bytes before tensor '{quoted}' belong to none", start - covered));
        }
        (covered, before) = (end, name);
    }
    match data_bytes - covered {
        0 => Ok(()),
        left => corrupt(format!("{left} bytes after the last tensor belong to none")),
    }
}

fn entry(path: &Path, name: &str, raw: &RawTensor, header_bytes: usize) -> Result<Entry, ModelError> {
    let name = printable(name);
    let unsupported = |what: String| ModelError::unsupported(path, format!("tensor '{name}' {what}"));
    let corrupt = |what: &str| ModelError::corrupt(path, format!("tensor '{name}' {what}"));
    let kind = match raw.dtype.as_str() {
        "F32" => WeightType::F32,
        "F16" => WeightType::F16,
        "BF16" => WeightType::BF16,
        other => {
            let other = printable(other);
            return Err(unsupported(format!("has type {other}; supported in safetensors: F32, F16, BF16")));
        }
    };
    let size = |value: u64| usize::try_from(value).map_err(|_| corrupt("has an impossible size"));
    let (rows, cols) = match *raw.shape.as_slice() {
        [cols] => (1, size(cols)?),
        [rows, cols] => (size(rows)?, size(cols)?),
        ref shape => return Err(unsupported(format!("has {} dimensions", shape.len()))),
    };
    let len = kind
        .row_bytes(cols)
        .and_then(|row_bytes| row_bytes.checked_mul(rows))
        .ok_or_else(|| corrupt("has an impossible size"))?;
    let (start, end) = raw.data_offsets;
    if end - start != len as u64 {
        return Err(corrupt(&format!(
            "takes {} bytes, but {rows} x {cols} of {kind} are {len}",
            end - start
        )));
    }
    if len == 0 {
        return Err(corrupt("is empty"));
    }
    // Within the file, as the layout was checked.
    let start = usize::try_from(start).ok().and_then(|start| start.checked_add(header_bytes));
    Ok(Entry { rows, cols, kind, start: start.ok_or_else(|| corrupt("has an impossible offset"))?, len })
}
