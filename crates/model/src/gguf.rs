//! A GGUF file mapped into memory: where each tensor lies, checked against the file's bounds.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, TensorInfo};
use memmap2::Mmap;

use crate::gguf_header::read_header;
use crate::mapped::{let_go, map_file};
use crate::metadata::Metadata;
use crate::tensors::{Entry, TensorTable};
use crate::{ModelError, Tensor, WeightType};

/// The mapped file and its table of tensors.
pub(crate) struct GgufFile {
    path: PathBuf,
    map: Mmap,
    header_bytes: usize,
    entries: HashMap<String, Entry>,
}

impl GgufFile {
    /// Maps the file and reads its header; returns the metadata apart, since it is wanted only once.
    pub(crate) fn open(path: &Path) -> Result<(GgufFile, Metadata), ModelError> {
        let map = map_file(path)?;
        let content = read_header(path, &map)?;
        let header_bytes = usize::try_from(content.tensor_data_offset).unwrap_or(usize::MAX);
        if header_bytes > map.len() {
            return Err(ModelError::corrupt(path, "truncated: the file ends before its tensors"));
        }
        let entries = content
            .tensor_infos
            .iter()
            .map(|(name, info)| Ok((name.clone(), entry(path, name, info, &content, map.len())?)))
            .collect::<Result<_, ModelError>>()?;
        let metadata = Metadata::new(path, content.metadata);
        Ok((GgufFile { path: path.to_owned(), map, header_bytes, entries }, metadata))
    }

    /// Bytes of everything before the tensors: metadata and table.
    pub(crate) fn header(&self) -> &[u8] {
        self.map.get(..self.header_bytes).unwrap_or_default()
    }

    pub(crate) fn file_bytes(&self) -> usize {
        self.map.len()
    }

    pub(crate) fn tensor_bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.len as u64).sum()
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let entry = self
            .entries
            .get(name)
            .ok_or_else(|| ModelError::corrupt(&self.path, format!("no tensor '{name}'")))?;
        let data = entry.bytes(&self.map).ok_or_else(|| {
            ModelError::corrupt(&self.path, format!("tensor '{name}' lies outside the file"))
        })?;
        Ok(Tensor {
            name: name.to_owned(),
            rows: entry.rows,
            cols: entry.cols,
            kind: entry.kind,
            data: Cow::Borrowed(data),
        })
    }

    pub(crate) fn let_go(&self, name: &str) {
        if let Some(entry) = self.entries.get(name) {
            let_go(&self.map, entry);
        }
    }
}

impl TensorTable for GgufFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    fn names(&self) -> Vec<&str> {
        self.entries.keys().map(String::as_str).collect()
    }

    fn own_name(&self, name: &str) -> String {
        name.to_owned()
    }
}

pub(crate) fn supported_types() -> String {
    WeightType::ALL.map(|kind| kind.to_string()).join(", ")
}

fn entry(
    path: &Path,
    name: &str,
    info: &TensorInfo,
    content: &Content,
    file_bytes: usize,
) -> Result<Entry, ModelError> {
    let kind = WeightType::from_ggml(info.ggml_dtype).ok_or_else(|| {
        ModelError::unsupported(
            path,
            format!(
                "tensor '{name}' has type {:?}; supported weights: {}",
                info.ggml_dtype,
                supported_types()
            ),
        )
    })?;
    let (rows, cols) = match *info.shape.dims() {
        [cols] => (1, cols),
        [rows, cols] => (rows, cols),
        ref dims => {
            return Err(ModelError::unsupported(
                path,
                format!("tensor '{name}' has {} dimensions", dims.len()),
            ));
        }
    };
    let corrupt = |what: &str| ModelError::corrupt(path, format!("tensor '{name}' {what}"));
    let row_bytes = kind.row_bytes(cols).ok_or_else(|| corrupt("has rows that are not whole blocks"))?;
    let len = row_bytes.checked_mul(rows).ok_or_else(|| corrupt("has an impossible size"))?;
    if len == 0 {
        return Err(corrupt("is empty"));
    }
    let start = content
        .tensor_data_offset
        .checked_add(info.offset)
        .and_then(|start| usize::try_from(start).ok())
        .ok_or_else(|| corrupt("has an impossible offset"))?;
    match start.checked_add(len) {
        Some(end) if end <= file_bytes => Ok(Entry { rows, cols, kind, start, len }),
        _ => Err(corrupt("lies outside the file: it is truncated or damaged")),
    }
}
