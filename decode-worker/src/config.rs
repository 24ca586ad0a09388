//! The options of a decode worker; each is defined here or in `WorkerConfig`, and nowhere else.

use baton_worker::{Scheduling, WorkerConfig};

/// Options of a decode worker. Every doc comment is the option's help text.
#[derive(Clone, Debug, clap::Args)]
pub struct DecodeWorkerConfig {
    /// What both kinds of worker have.
    #[command(flatten)]
    pub worker: WorkerConfig,

    /// Share of all KV blocks that may be receiving KV at once, above 0 and up to 1; one sequence always may
    #[arg(long, env = "BATON_MAX_RECEIVING_SHARE", value_name = "SHARE", default_value_t = 0.5, value_parser = share)]
    pub max_receiving_share: f32,

    /// Prompt tokens that one step computes here, at most, while other sequences decode; at least one block
    #[arg(long, env = "BATON_LOCAL_PREFILL_TOKENS", value_name = "TOKENS", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(16..=65536))]
    pub local_prefill_tokens: u32,

    /// By what share of itself a decode step may grow for a sequence that has just begun to decode here, 0 to 10: if its context is too long for that, its
    /// first 16 tokens are computed a few layers a step, so that they come later and those of others on time; 0: never
    #[arg(long, env = "BATON_MAX_STEP_GROWTH", value_name = "SHARE", default_value_t = 0.1, value_parser = growth)]
    pub max_step_growth: f64,

    /// Port for KV on the address of --listen; 0 picks a free one
    #[arg(long, env = "BATON_BULK_PORT", value_name = "PORT", default_value_t = 0)]
    pub bulk_port: u16,
}

fn share(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("a number above 0 and up to 1".to_owned()),
    }
}

fn growth(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=10.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 to 10".to_owned()),
    }
}

impl DecodeWorkerConfig {
    pub(crate) fn scheduling(&self) -> Scheduling {
        Scheduling {
            max_receiving_share: self.max_receiving_share,
            local_prefill_tokens: (self.local_prefill_tokens as usize).max(self.worker.block_size),
            max_step_growth: self.max_step_growth,
            ..Scheduling::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct Command {
        #[command(flatten)]
        config: DecodeWorkerConfig,
    }

    #[test]
    fn a_share_is_above_zero_and_at_most_one() {
        for bad in ["0", "-0.5", "1.01", "NaN", "half"] {
            let argument = format!("--max-receiving-share={bad}");
            let error = Command::try_parse_from(["decode", &argument]).unwrap_err().to_string();
            assert!(error.contains("--max-receiving-share") && error.contains("up to 1"), "{error}");
        }
        let command = Command::try_parse_from(["decode", "--max-receiving-share", "1"]).unwrap();
        assert_eq!(command.config.max_receiving_share, 1.0);
    }

    #[test]
    fn a_step_may_grow_by_up_to_ten_times() {
        for bad in ["-0.1", "10.01", "NaN", "inf", "some"] {
            let argument = format!("--max-step-growth={bad}");
            let error = Command::try_parse_from(["decode", &argument]).unwrap_err().to_string();
            assert!(error.contains("--max-step-growth") && error.contains("from 0 to 10"), "{error}");
        }
        let growth = |argument| {
            Command::try_parse_from(["decode", argument]).unwrap().config.scheduling().max_step_growth
        };
        assert_eq!((growth("--max-step-growth=0"), growth("--max-receiving-share=1")), (0.0, 0.1));
    }

    #[test]
    fn a_local_chunk_is_never_less_than_a_block() {
        let command =
            Command::try_parse_from(["decode", "--local-prefill-tokens=16", "--block-size=64"]).unwrap();
        assert_eq!(command.config.scheduling().local_prefill_tokens, 64);
    }
}
