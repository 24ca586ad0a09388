//! The weights of a model folder: one safetensors file, or several with an index.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::folder::{INDEX_FILE, WEIGHTS_FILE, read_document};
use crate::name::is_segment;
use crate::safetensors::SafetensorsFile;
use crate::tensors::{Entry, TensorTable};
use crate::{ModelError, Tensor, hf_names};

const MAX_INDEX_BYTES: u64 = 64 << 20;
const MAX_SHARDS: usize = 1024;

/// Mapped shards and one table over all their tensors, under GGUF's names.
pub(crate) struct Checkpoint {
    folder: PathBuf,
    /// In the order of their names.
    shards: Vec<SafetensorsFile>,
    entries: HashMap<String, Place>,
}

struct Place {
    shard: usize,
    entry: Entry,
}

impl Checkpoint {
    /// Maps all files. `tied` says that the output matrix is the embedding: a copy of it in the file is left out.
    pub(crate) fn open(folder: &Path, tied: bool) -> Result<Checkpoint, ModelError> {
        let single = folder.join(WEIGHTS_FILE);
        let shards =
            if single.is_file() { vec![SafetensorsFile::open(&single)?] } else { open_shards(folder)? };
        let mut entries: HashMap<String, Place> = HashMap::new();
        for (shard, file) in shards.iter().enumerate() {
            for (own_name, entry) in file.entries() {
                let name = hf_names::to_gguf(own_name);
                if hf_names::is_derived(own_name) || (tied && name == "output.weight") {
                    continue;
                }
                if entries.insert(name, Place { shard, entry: *entry }).is_some() {
                    return Err(ModelError::corrupt(
                        file.path(),
                        format!("tensor '{own_name}' is there twice"),
                    ));
                }
            }
        }
        Ok(Checkpoint { folder: folder.to_owned(), shards, entries })
    }

    pub(crate) fn shards(&self) -> &[SafetensorsFile] {
        &self.shards
    }

    pub(crate) fn tensor_bytes(&self) -> u64 {
        self.entries.values().map(|place| place.entry.len as u64).sum()
    }

    pub(crate) fn let_go(&self, name: &str) {
        let place = self.entries.get(name);
        if let Some((file, place)) = place.and_then(|place| Some((self.shards.get(place.shard)?, place))) {
            file.let_go(&place.entry);
        }
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let found =
            self.entries.get(name).and_then(|place| Some((self.shards.get(place.shard)?, place.entry)));
        let (file, entry) = found.ok_or_else(|| {
            ModelError::corrupt(&self.folder, format!("no tensor '{}'", self.own_name(name)))
        })?;
        Ok(Tensor {
            name: name.to_owned(),
            rows: entry.rows,
            cols: entry.cols,
            kind: entry.kind,
            data: Cow::Borrowed(file.bytes(&entry)?),
        })
    }
}

impl TensorTable for Checkpoint {
    fn path(&self) -> &Path {
        &self.folder
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name).map(|place| &place.entry)
    }

    fn names(&self) -> Vec<&str> {
        self.entries.keys().map(String::as_str).collect()
    }

    fn own_name(&self, name: &str) -> String {
        hf_names::from_gguf(name)
    }
}

/// `model.safetensors.index.json`: which file holds which tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    fn read(path: &Path) -> Result<Index, ModelError> {
        let bytes = read_document(path, MAX_INDEX_BYTES)?
            .ok_or_else(|| ModelError::NotFound { path: path.with_file_name(WEIGHTS_FILE) })?;
        Index::parse(path, &bytes)
    }

    fn parse(path: &Path, bytes: &[u8]) -> Result<Index, ModelError> {
        serde_json::from_slice(bytes)
            .map_err(|error| ModelError::corrupt(path, format!("not an index of shards: {error}")))
    }

    /// The files it names, each a plain name of a safetensors file in the same folder.
    fn shards(&self, path: &Path) -> Result<BTreeSet<&str>, ModelError> {
        let shards: BTreeSet<&str> = self.weight_map.values().map(String::as_str).collect();
        if let Some(bad) = shards.iter().find(|name| !is_segment(name) || !name.ends_with(".safetensors")) {
            return Err(ModelError::corrupt(path, format!("{bad:?} is no name of a safetensors file")));
        }
        if shards.is_empty() {
            return Err(ModelError::corrupt(path, "it names no file"));
        }
        if shards.len() > MAX_SHARDS {
            return Err(ModelError::TooLarge {
                path: path.to_owned(),
                field: "number of shards".to_owned(),
                value: shards.len() as u64,
                limit: MAX_SHARDS as u64,
            });
        }
        Ok(shards)
    }
}

/// The files that the index at `path` names.
pub(crate) fn shard_names(path: &Path) -> Result<Vec<String>, ModelError> {
    Ok(Index::read(path)?.shards(path)?.into_iter().map(str::to_owned).collect())
}

fn open_shards(folder: &Path) -> Result<Vec<SafetensorsFile>, ModelError> {
    let path = folder.join(INDEX_FILE);
    let index = Index::read(&path)?;
    let names = index.shards(&path)?;
    let mut shards = Vec::with_capacity(names.len());
    for name in names {
        let file = SafetensorsFile::open(&folder.join(name)).map_err(|error| match error {
            ModelError::NotFound { .. } => {
                ModelError::corrupt(&path, format!("shard '{name}' is missing: fetch the model anew"))
            }
            other => other,
        })?;
        let held: BTreeSet<&str> = file.entries().map(|(tensor, _)| tensor).collect();
        let mut promised = index.weight_map.iter().filter(|(_, shard)| *shard == name);
        if let Some((tensor, _)) = promised.find(|(tensor, _)| !held.contains(tensor.as_str())) {
            return Err(ModelError::corrupt(&path, format!("tensor {tensor:?} is not in shard '{name}'")));
        }
        shards.push(file);
    }
    Ok(shards)
}
