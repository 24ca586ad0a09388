//! A file mapped into memory, read-only.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::ModelError;
use crate::tensors::Entry;

/// Maps a whole file. The map outlives the file's name: see `Model::open` for what a caller may do to the file.
pub(crate) fn map_file(path: &Path) -> Result<Mmap, ModelError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(ModelError::NotFound { path: path.to_owned() });
        }
        Err(error) => return Err(ModelError::io("open", path)(error)),
    };
    if !file.metadata().map_err(ModelError::io("read", path))?.is_file() {
        return Err(ModelError::corrupt(path, "not a file"));
    }
    // SAFETY: the map is read-only and owned by one value, which hands out slices no longer than itself. What the type
    // system can't see is another process changing the file: files in the cache folder are only ever replaced by
    // rename, which leaves the mapped one as it was, and `Model::open` asks the same of its callers.
    // Tests: `mapped_tensors_are_the_files_bytes`, `a_mapped_file_may_be_replaced_or_removed`.
    unsafe { Mmap::map(&file) }.map_err(ModelError::io("map", path))
}

/// Says that a tensor's bytes won't be read soon, so that they stop counting as this process's memory. Whoever does read them gets
/// them from the file again.
pub(crate) fn let_go(map: &Mmap, entry: &Entry) {
    let within = entry.start.checked_add(entry.len).is_some_and(|end| end <= map.len());
    #[cfg(unix)]
    if within {
        // SAFETY: the map is read-only, so its pages hold what the file holds and can be had from it again: no byte changes for anyone
        // who has a slice of them. Advice that the system refuses changes nothing. Test: `what_was_let_go_reads_the_same`.
        let _ =
            unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, entry.start, entry.len) };
    }
    #[cfg(not(unix))]
    let _ = within;
}
