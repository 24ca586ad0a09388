//! The numbers that describe a model.

/// How rotary position embedding pairs the elements of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Element `2i` turns with `2i + 1`. Llama GGUF files are stored for this one (their q and k rows are permuted).
    Interleaved,
    /// Element `i` turns with `i + head_dim / 2`. Safetensors models and Qwen GGUF files are stored for this one.
    HalfSplit,
}

/// How rotary frequencies differ from `rope_base ^ (-2i / head_dim)`, `i` in `0..head_dim / 2`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// They don't.
    None,
    /// Each frequency is divided by this factor (position interpolation).
    Linear(f32),
    /// Frequency `i` is divided by element `i`; `head_dim / 2` of them (how Llama 3.1 extends its context; GGUF tensor
    /// `rope_freqs.weight`, `rope_type` `llama3` of a `config.json`).
    Factors(Vec<f32>),
}

/// A model's configuration. All numbers were checked against each other and against the tensors' shapes when the
/// model was opened: none is zero, `num_heads` is a multiple of `num_kv_heads`, `head_dim` is even.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Architecture family: `llama`, `qwen2` or `qwen3`.
    pub family: String,
    /// The name the model gives itself.
    pub name: String,
    /// Decoder layers.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; each serves `num_heads / num_kv_heads` query heads.
    pub num_kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Rows of the embedding: valid token ids are below this.
    pub vocab: usize,
    /// Positions the model was trained for, in tokens.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Pairing of the rotary embedding.
    pub rope_style: RopeStyle,
    /// Correction of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Added to the mean square in RMS normalisation.
    pub rms_eps: f32,
    /// Whether the output matrix is the embedding (there is no `output.weight`).
    pub tied_embedding: bool,
    /// Whether the query, key and value projections add `blk.N.attn_{q,k,v}.bias`.
    pub attention_bias: bool,
    /// Whether each query and key head is RMS-normalised, with the weights `blk.N.attn_{q,k}_norm.weight` of
    /// `head_dim` elements and `rms_eps`, after its projection and before it is rotated.
    pub qk_norm: bool,
    /// Beginning-of-sequence token, if the model has one.
    pub bos: Option<u32>,
    /// Every token that ends a generation (end of sequence, end of turn, ...), ascending.
    pub eos: Vec<u32>,
    /// The end token that chat templates mean by `eos_token`.
    pub turn_end: Option<u32>,
    /// Whether a prompt given as plain text starts with `bos`.
    pub add_bos: bool,
}
