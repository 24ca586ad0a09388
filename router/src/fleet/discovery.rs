//! Where the list of workers comes from.

use baton_dispatch::Role;

use crate::RouterConfig;

/// A source of workers.
pub(crate) enum Discovery {
    /// Named by the user, fixed while the router runs.
    Static { prefill: Vec<String>, decode: Vec<String> },
}

impl Discovery {
    pub(crate) fn from_config(config: &RouterConfig) -> Self {
        Self::Static { prefill: config.prefill_worker.clone(), decode: config.decode_worker.clone() }
    }

    /// Every worker's role and address; their order breaks ties.
    pub(crate) fn workers(&self) -> Vec<(Role, String)> {
        match self {
            Self::Static { prefill, decode } => {
                let prefill = prefill.iter().map(|address| (Role::Prefill, address.clone()));
                prefill.chain(decode.iter().map(|address| (Role::Decode, address.clone()))).collect()
            }
        }
    }
}
