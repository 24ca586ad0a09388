//! A model folder as the Hugging Face hub lays it out: its small documents.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::ModelError;

/// The configuration; without it a folder is no model folder.
pub(crate) const CONFIG_FILE: &str = "config.json";
pub(crate) const GENERATION_FILE: &str = "generation_config.json";
pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
pub(crate) const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
pub(crate) const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The weights, if they are one file.
pub(crate) const WEIGHTS_FILE: &str = "model.safetensors";
/// Which file holds which weight, if they are several.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// All documents and the most bytes each may have.
pub(crate) const DOCUMENTS: [(&str, u64); 5] = [
    (CONFIG_FILE, 4 << 20),
    (GENERATION_FILE, 4 << 20),
    (TOKENIZER_FILE, 512 << 20),
    (TOKENIZER_CONFIG_FILE, 64 << 20),
    (TEMPLATE_FILE, 4 << 20),
];

/// Whether files of these names make a safetensors model.
pub(crate) fn is_model(has: impl Fn(&str) -> bool) -> bool {
    has(CONFIG_FILE) && (has(WEIGHTS_FILE) || has(INDEX_FILE))
}

/// The documents that are in a folder.
pub(crate) struct Folder {
    path: PathBuf,
    documents: Vec<(&'static str, Vec<u8>)>,
}

impl Folder {
    pub(crate) fn read(path: &Path) -> Result<Folder, ModelError> {
        if !path.is_dir() {
            return Err(ModelError::NotFound { path: path.to_owned() });
        }
        let mut documents = Vec::new();
        for (name, limit) in DOCUMENTS {
            if let Some(bytes) = read_document(&path.join(name), limit)? {
                documents.push((name, bytes));
            }
        }
        Ok(Folder { path: path.to_owned(), documents })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Every document there is, in a fixed order.
    pub(crate) fn documents(&self) -> &[(&'static str, Vec<u8>)] {
        &self.documents
    }

    /// The bytes of a document, if it is there.
    pub(crate) fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.documents.iter().find(|(known, _)| *known == name).map(|(_, bytes)| bytes.as_slice())
    }

    /// A document read as JSON, if it is there.
    pub(crate) fn json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ModelError> {
        let Some(bytes) = self.bytes(name) else { return Ok(None) };
        let parsed = serde_json::from_slice(bytes);
        parsed.map(Some).map_err(|error| ModelError::corrupt(&self.path.join(name), error.to_string()))
    }

    /// A document as text, if it is there.
    pub(crate) fn text(&self, name: &str) -> Result<Option<String>, ModelError> {
        let Some(bytes) = self.bytes(name) else { return Ok(None) };
        let text = std::str::from_utf8(bytes);
        text.map(|text| Some(text.to_owned()))
            .map_err(|error| ModelError::corrupt(&self.path.join(name), error.to_string()))
    }
}

/// A whole file of at most `limit` bytes; `None` if there is none.
pub(crate) fn read_document(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, ModelError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ModelError::io("open", path)(error)),
    };
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(ModelError::io("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(ModelError::TooLarge {
            path: path.to_owned(),
            field: "size in bytes".to_owned(),
            value: std::fs::metadata(path).map_or(bytes.len() as u64, |metadata| metadata.len()),
            limit,
        });
    }
    Ok(Some(bytes))
}
