//! Typed reading of GGUF metadata, with errors that name the key.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Value;

use crate::ModelError;

/// The key-value part of a GGUF header.
pub(crate) struct Metadata {
    path: PathBuf,
    values: HashMap<String, Value>,
}

impl Metadata {
    pub(crate) fn new(path: &Path, values: HashMap<String, Value>) -> Metadata {
        Metadata { path: path.to_owned(), values }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn wrong(&self, key: &str, expected: &str) -> ModelError {
        ModelError::corrupt(&self.path, format!("metadata '{key}' is not {expected}"))
    }

    /// A non-negative whole number, whatever its width in the file.
    pub(crate) fn number(&self, key: &str) -> Result<Option<u64>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(value) => match integer(value).and_then(|value| u64::try_from(value).ok()) {
                Some(value) => Ok(Some(value)),
                None => Err(self.wrong(key, "a whole number")),
            },
        }
    }

    /// A size that must be there, between 1 and `limit`.
    pub(crate) fn size(&self, key: &str, limit: usize) -> Result<usize, ModelError> {
        let value = self.number(key)?;
        self.bounded(key, value.ok_or_else(|| self.missing(key))?, limit)
    }

    /// Like [`Metadata::size`], with a value for when the key is absent.
    pub(crate) fn size_or(&self, key: &str, limit: usize, default: usize) -> Result<usize, ModelError> {
        match self.number(key)? {
            Some(value) => self.bounded(key, value, limit),
            None => Ok(default),
        }
    }

    fn bounded(&self, key: &str, value: u64, limit: usize) -> Result<usize, ModelError> {
        match usize::try_from(value) {
            Ok(0) => Err(ModelError::corrupt(&self.path, format!("metadata '{key}' is 0"))),
            Ok(size) if size <= limit => Ok(size),
            _ => Err(ModelError::TooLarge {
                path: self.path.clone(),
                field: key.to_owned(),
                value,
                limit: limit as u64,
            }),
        }
    }

    pub(crate) fn missing(&self, key: &str) -> ModelError {
        ModelError::corrupt(&self.path, format!("metadata '{key}' is missing"))
    }

    /// A finite number.
    pub(crate) fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let value = match self.values.get(key) {
            None => return Ok(None),
            Some(Value::F32(value)) => *value,
            Some(Value::F64(value)) => *value as f32,
            Some(_) => return Err(self.wrong(key, "a number")),
        };
        if value.is_finite() { Ok(Some(value)) } else { Err(self.wrong(key, "a finite number")) }
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    /// A list of strings, moved out; empty if absent.
    pub(crate) fn take_texts(&mut self, key: &str) -> Result<Vec<String>, ModelError> {
        let list = match self.values.remove(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(_) => return Err(self.wrong(key, "a list of strings")),
        };
        list.into_iter()
            .map(|value| match value {
                Value::String(text) => Ok(text),
                _ => Err(self.wrong(key, "a list of strings")),
            })
            .collect()
    }

    /// A list of whole numbers; empty if absent.
    pub(crate) fn integers(&self, key: &str) -> Result<Vec<i64>, ModelError> {
        match self.values.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list
                .iter()
                .map(|value| integer(value).ok_or_else(|| self.wrong(key, "a list of whole numbers")))
                .collect(),
            Some(_) => Err(self.wrong(key, "a list of whole numbers")),
        }
    }
}

fn integer(value: &Value) -> Option<i64> {
    match *value {
        Value::U8(value) => Some(value.into()),
        Value::I8(value) => Some(value.into()),
        Value::U16(value) => Some(value.into()),
        Value::I16(value) => Some(value.into()),
        Value::U32(value) => Some(value.into()),
        Value::I32(value) => Some(value.into()),
        Value::U64(value) => i64::try_from(value).ok(),
        Value::I64(value) => Some(value),
        _ => None,
    }
}
