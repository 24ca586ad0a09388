//! Where an engine's weights come from.

use baton_model::{Model, ModelConfig, ModelError, Tensor};

/// A configuration with its tensors; [`Model`] is one, tests make their own.
pub trait WeightSource {
    /// The model's numbers.
    fn config(&self) -> &ModelConfig;

    /// Tells models apart.
    fn digest(&self) -> [u8; 32];

    /// The tensor of this name, in GGUF's scheme.
    ///
    /// # Errors
    /// [`ModelError`] if there is none or it can't be read.
    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError>;

    /// The tensor was packed and is not wanted any more.
    fn let_go(&self, _name: &str) {}
}

impl WeightSource for Model {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn digest(&self) -> [u8; 32] {
        self.digest
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        Model::tensor(self, name)
    }

    fn let_go(&self, name: &str) {
        Model::let_go(self, name);
    }
}
