//! The model that is served, as far as a router needs it: its name, its text side, its end tokens.

use baton_model::{Model, ModelName, NoProgress, ResolveOptions, resolve};
use baton_text::TextModel;

use crate::{RouterConfig, RouterError};

/// A model whose tokenizer is ready.
pub(crate) struct Served {
    /// Clients know it by this name.
    pub(crate) name: String,
    pub(crate) text: TextModel,
    /// Tokens that end a generation.
    pub(crate) end_tokens: Vec<u32>,
    /// Workers must serve the same model.
    pub(crate) digest: [u8; 32],
    /// Positions the model was trained for, in tokens.
    pub(crate) context: u32,
}

impl Served {
    /// Finds and opens the model. Blocks.
    pub(crate) fn load(config: &RouterConfig) -> Result<Self, RouterError> {
        let name: ModelName = config.model.parse()?;
        let progress = NoProgress;
        let mut options = ResolveOptions::from_env(&progress);
        if let Some(folder) = &config.cache_dir {
            options.cache_dir.clone_from(folder);
        }
        let source = resolve(&name, &options)?;
        let model = Model::open(&source)?;
        let served_name = match (&config.served_model_name, &source) {
            (Some(name), _) => name.trim().to_owned(),
            (None, baton_model::ModelSource::Tiny) => name.to_string(),
            (None, baton_model::ModelSource::File(path)) => {
                path.file_stem().map_or_else(|| name.to_string(), |stem| stem.to_string_lossy().into_owned())
            }
            // A folder's name may hold a dot that begins no extension, as in "Qwen2.5-0.5B".
            (None, baton_model::ModelSource::Folder(path)) => {
                path.file_name().map_or_else(|| name.to_string(), |last| last.to_string_lossy().into_owned())
            }
        };
        Ok(Self {
            name: served_name,
            text: TextModel::open(&model)?,
            end_tokens: model.config.eos.clone(),
            digest: model.digest,
            context: u32::try_from(model.config.context).unwrap_or(u32::MAX),
        })
    }

    /// Whether a client that asks for `name` means this model.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        name.is_empty() || name == "default" || name == self.name
    }
}
