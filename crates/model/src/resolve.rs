//! From a name to a file or folder on this machine.

use std::path::{Path, PathBuf};

use crate::folder::{CONFIG_FILE, WEIGHTS_FILE};
use crate::hub::HubOptions;
use crate::{ModelError, ModelName, Progress, default_cache_dir, default_model, folder, hub};

/// A model that is on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// Made in memory.
    Tiny,
    /// A GGUF file.
    File(PathBuf),
    /// A folder with `config.json`, `model.safetensors` (or several files and `model.safetensors.index.json`) and
    /// `tokenizer.json`, as model hubs lay it out.
    Folder(PathBuf),
}

/// How [`resolve`] may go about it.
pub struct ResolveOptions<'a> {
    /// The folder models are kept in; made when needed.
    pub cache_dir: PathBuf,
    /// Hears how far a fetch is.
    pub progress: &'a dyn Progress,
    /// Never fetch: what is not in the cache is an error.
    pub offline: bool,
    /// The model hub and how to speak to it.
    pub hub: HubOptions,
}

impl<'a> ResolveOptions<'a> {
    /// Options from the environment: [`default_cache_dir`], [`HubOptions::from_env`], and `HF_HUB_OFFLINE=1`.
    pub fn from_env(progress: &'a dyn Progress) -> ResolveOptions<'a> {
        ResolveOptions {
            cache_dir: default_cache_dir(),
            progress,
            offline: std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| value == "1"),
            hub: HubOptions::from_env(),
        }
    }
}

/// Finds a model, fetching it into the cache folder the first time. Blocks; call it off any async runtime.
///
/// Interrupting it at any moment leaves nothing that a later call would take for a model: files get their name last.
/// Two processes that resolve the same model at once fetch it once.
///
/// # Errors
/// [`ModelError::NotFound`] (path, repository or file), [`ModelError::Ambiguous`], [`ModelError::Offline`],
/// [`ModelError::MissingTool`], [`ModelError::Download`], [`ModelError::Corrupt`] (wrong checksum), [`ModelError::Io`].
pub fn resolve(name: &ModelName, options: &ResolveOptions<'_>) -> Result<ModelSource, ModelError> {
    match name {
        ModelName::Tiny => Ok(ModelSource::Tiny),
        ModelName::Path(path) => resolve_path(path),
        ModelName::Default => default_model::resolve(options).map(ModelSource::File),
        ModelName::Hub { repo, file } => hub::resolve(repo, file.as_deref(), options),
    }
}

/// A folder that holds both a safetensors model and GGUF files stands for the former; the latter can be named.
fn resolve_path(path: &Path) -> Result<ModelSource, ModelError> {
    if path.is_file() {
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let what = "a safetensors model is named by its folder, which also holds config.json";
            return Err(ModelError::unsupported(path, what));
        }
        return Ok(ModelSource::File(path.to_owned()));
    }
    if !path.is_dir() {
        return Err(ModelError::NotFound { path: path.to_owned() });
    }
    if folder::is_model(|name| path.join(name).is_file()) {
        return Ok(ModelSource::Folder(path.to_owned()));
    }
    only_gguf(path).map(ModelSource::File)
}

fn only_gguf(path: &Path) -> Result<PathBuf, ModelError> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(ModelError::io("read", path))? {
        let name = entry.map_err(ModelError::io("read", path))?.file_name().to_string_lossy().into_owned();
        if name.to_ascii_lowercase().ends_with(".gguf") {
            files.push(name);
        }
    }
    files.sort_unstable();
    match files.as_slice() {
        // What is missing is told by what is there.
        [] if path.join(CONFIG_FILE).is_file() => Err(ModelError::NotFound { path: path.join(WEIGHTS_FILE) }),
        [] if path.join(WEIGHTS_FILE).is_file() => Err(ModelError::NotFound { path: path.join(CONFIG_FILE) }),
        [] => Err(ModelError::NotFound { path: path.join("*.gguf") }),
        [file] => Ok(path.join(file)),
        _ => Err(ModelError::Ambiguous { what: path.display().to_string(), files }),
    }
}
