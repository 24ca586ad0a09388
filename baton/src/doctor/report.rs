//! What `baton doctor` found, as JSON and as text.

use std::fmt;

use baton_worker::ByteSize;
use serde::Serialize;

/// Everything found; parts are absent where something before them went wrong.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    /// Whether a worker with these options would run here, now.
    pub(super) ok: bool,
    pub(super) model: Option<ModelFacts>,
    pub(super) engine: Option<EngineFacts>,
    pub(super) memory: Option<MemoryFacts>,
    pub(super) context: Option<ContextFacts>,
    /// What CUDA there is, and what of it is missing, in one line.
    pub(super) cuda: Option<String>,
    /// Why it would not run, the first first.
    pub(super) problems: Vec<Problem>,
}

/// One reason why it does not run.
#[derive(Debug, Serialize)]
pub(super) struct Problem {
    /// What it concerns: `options`, `model`, `engine`, `context` or `memory`.
    pub(super) about: &'static str,
    /// The line that a worker would end with.
    pub(super) line: String,
    /// And its exit code.
    pub(super) exit_code: u8,
}

/// What would be loaded.
#[derive(Debug, Serialize)]
pub(super) struct ModelFacts {
    /// The name it gives itself.
    pub(super) name: String,
    pub(super) family: String,
    /// File or folder.
    pub(super) source: String,
    pub(super) num_layers: usize,
    pub(super) hidden: usize,
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) vocab: usize,
    /// All tensors as they are stored.
    pub(super) stored_bytes: u64,
    pub(super) tokenizer: String,
    pub(super) chat_template: bool,
}

/// How it would be computed.
#[derive(Debug, Serialize)]
pub(super) struct EngineFacts {
    /// `cpu` or `cuda:N`.
    pub(super) device: String,
    /// Instruction set chosen.
    pub(super) kernels: &'static str,
    /// Those that this CPU has, best first.
    pub(super) available: Vec<&'static str>,
    /// Arithmetic of products with quantised weights: `int8` or `f32`.
    pub(super) arithmetic: &'static str,
    pub(super) num_threads: usize,
    /// How the matrices are kept in memory.
    pub(super) weights: String,
    pub(super) quantize: &'static str,
    pub(super) kv_dtype: &'static str,
    /// Bytes of KV that a token takes over all layers.
    pub(super) kv_token_bytes: usize,
    /// Tokens.
    pub(super) block_size: usize,
    /// Workers with another numerics id of the same kind of device refuse each other.
    pub(super) numerics: String,
}

/// Bytes it would take.
#[derive(Debug, Serialize)]
pub(super) struct MemoryFacts {
    pub(super) weights_bytes: usize,
    /// Activations of a step.
    pub(super) scratch_bytes: usize,
    /// KV blocks under these options; null if they don't fit.
    pub(super) kv_bytes: Option<u64>,
    /// Tokens that these hold.
    pub(super) kv_tokens: Option<u64>,
    /// What this process can have; null where the system does not tell.
    pub(super) available_bytes: Option<u64>,
}

/// Tokens of prompt and output together.
#[derive(Debug, Serialize)]
pub(super) struct ContextFacts {
    /// Asked for.
    pub(super) tokens: usize,
    /// What the model was made for.
    pub(super) of_model: usize,
    /// The largest of which one sequence fits, if KV may have all memory beside the model, or `--kv-memory`.
    pub(super) fits: u64,
}

impl fmt::Display for ModelFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row(f, "model", &format!("{} ({}), {}", self.name, self.family, self.source))?;
        row(
            f,
            "",
            &format!(
                "{} layers, hidden {}, {} heads over {} KV heads of {}, vocabulary {}, {} of weights",
                self.num_layers,
                self.hidden,
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.vocab,
                ByteSize(self.stored_bytes)
            ),
        )?;
        let template = if self.chat_template { "its own" } else { "none, a plain one is used" };
        row(f, "tokenizer", &format!("{}; chat template: {template}", self.tokenizer))
    }
}

impl fmt::Display for EngineFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (threads, others) = (self.num_threads, self.available.join(", "));
        row(f, "device", &self.device)?;
        row(
            f,
            "kernels",
            &format!(
                "{} on {threads} threads, products in {} (this CPU has: {others})",
                self.kernels, self.arithmetic
            ),
        )?;
        row(f, "weights", &format!("kept as {} (--quantize {})", self.weights, self.quantize))?;
        row(
            f,
            "KV",
            &format!(
                "{}, {} bytes a token, blocks of {} tokens",
                self.kv_dtype, self.kv_token_bytes, self.block_size
            ),
        )?;
        row(f, "numerics", &self.numerics)
    }
}

impl fmt::Display for MemoryFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kv = match (self.kv_bytes, self.kv_tokens) {
            (Some(bytes), Some(tokens)) => format!("KV {} ({tokens} tokens)", ByteSize(bytes)),
            _ => "KV does not fit".to_owned(),
        };
        let available = self
            .available_bytes
            .map_or_else(|| "an unknown amount".to_owned(), |bytes| ByteSize(bytes).to_string());
        row(
            f,
            "memory",
            &format!(
                "weights {}, activations {}, {kv}; {available} can be had",
                ByteSize(self.weights_bytes as u64),
                ByteSize(self.scratch_bytes as u64)
            ),
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(model) = &self.model {
            write!(f, "{model}")?;
        }
        if let Some(engine) = &self.engine {
            write!(f, "{engine}")?;
        }
        if let Some(memory) = &self.memory {
            write!(f, "{memory}")?;
        }
        if let Some(context) = &self.context {
            let ContextFacts { tokens, of_model, fits } = context;
            row(
                f,
                "context",
                &format!("{tokens} of the model's {of_model} tokens; the largest that fits is {fits}"),
            )?;
        }
        if let Some(cuda) = &self.cuda {
            row(f, "CUDA", cuda)?;
        }
        for problem in &self.problems {
            row(f, "problem", &format!("{}: {}", problem.about, problem.line))?;
        }
        row(f, "verdict", if self.ok { "it runs" } else { "it does not run" })
    }
}

fn row(f: &mut fmt::Formatter<'_>, label: &str, text: &str) -> fmt::Result {
    writeln!(f, "{label:<11}{text}")
}
