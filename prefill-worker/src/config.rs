//! The options of a prefill worker; each is defined here or in `WorkerConfig`, and nowhere else.

use baton_worker::{Scheduling, WorkerConfig};

/// Options of a prefill worker. Every doc comment is the option's help text.
#[derive(Clone, Debug, clap::Args)]
pub struct PrefillWorkerConfig {
    /// What both kinds of worker have.
    #[command(flatten)]
    pub worker: WorkerConfig,

    /// Prompts computed in turns at once, each holding KV blocks, 1 to 256
    #[arg(long, env = "BATON_MAX_OPEN_PROMPTS", value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_open_prompts: u32,

    /// Waiting prompts for which room is asked on their decode workers ahead of being computed, 1 to 256
    #[arg(long, env = "BATON_LOOKAHEAD", value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub lookahead: u32,
}

impl PrefillWorkerConfig {
    pub(crate) fn scheduling(&self) -> Scheduling {
        Scheduling {
            max_open_prompts: self.max_open_prompts as usize,
            lookahead: self.lookahead as usize,
            ..Scheduling::default()
        }
    }
}
