//! A digest that tells models apart, and the SHA-256 of a file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::ModelError;
use crate::checkpoint::Checkpoint;
use crate::folder::Folder;
use crate::gguf::GgufFile;
use crate::tensors::TensorTable;

/// Bytes taken at the start, in the middle and at the end of each tensor.
const SAMPLE_BYTES: usize = 4096;

/// Digest of an opened GGUF file: SHA-256 over the whole header (configuration, tokenizer, tensor table), the file's
/// length, and three samples of 4 KiB of each tensor, in the order of their names.
///
/// It reads a few megabytes whatever the size of the model, so it costs milliseconds at start. Two models that differ
/// in any setting, name, shape or (training changes them everywhere) in their weights have different digests; a
/// single flipped bit inside a large tensor may go unseen, which a full checksum at download has to catch.
pub(crate) fn of_gguf(file: &GgufFile) -> Result<[u8; 32], ModelError> {
    let mut hash = Sha256::new();
    hash.update(b"baton gguf digest 1");
    hash.update((file.header().len() as u64).to_le_bytes());
    hash.update(file.header());
    hash.update((file.file_bytes() as u64).to_le_bytes());
    let mut names = file.names();
    names.sort_unstable();
    for name in names {
        sample(&mut hash, &file.tensor(name)?.data);
    }
    Ok(hash.finalize().into())
}

/// Digest of a model folder: SHA-256 over its documents (configuration, tokenizer, template), and of each safetensors
/// file, in the order of their names, what [`of_gguf`] takes of a GGUF file.
pub(crate) fn of_folder(folder: &Folder, weights: &Checkpoint) -> Result<[u8; 32], ModelError> {
    let mut hash = Sha256::new();
    hash.update(b"baton folder digest 1");
    for (name, bytes) in folder.documents() {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    for shard in weights.shards() {
        hash.update((shard.header().len() as u64).to_le_bytes());
        hash.update(shard.header());
        hash.update((shard.file_bytes() as u64).to_le_bytes());
        let mut entries: Vec<_> = shard.entries().collect();
        entries.sort_unstable_by_key(|(name, _)| *name);
        for (_, entry) in entries {
            sample(&mut hash, shard.bytes(entry)?);
        }
    }
    Ok(hash.finalize().into())
}

/// All of a short tensor; start, middle and end of a long one.
fn sample(hash: &mut Sha256, data: &[u8]) {
    if data.len() <= 3 * SAMPLE_BYTES {
        hash.update(data);
        return;
    }
    for start in [0, data.len() / 2, data.len() - SAMPLE_BYTES] {
        hash.update(data.get(start..start + SAMPLE_BYTES).unwrap_or_default());
    }
}

/// Digest of weights that are made, not read: of what made them and of every byte.
pub(crate) fn of_bytes<'a>(label: &str, parts: impl Iterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(label.as_bytes());
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// SHA-256 of a whole file.
pub(crate) fn sha256_of_file(path: &Path) -> Result<[u8; 32], ModelError> {
    let mut file = File::open(path).map_err(ModelError::io("open", path))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer).map_err(ModelError::io("read", path))? {
            0 => return Ok(hash.finalize().into()),
            len => hash.update(buffer.get(..len).unwrap_or_default()),
        }
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
