//! The pseudo model: hashes in the places of a transformer's numbers.
//!
//! `hidden[0][i]` is the token; `kv[l][i] = mix(l, i, hidden[l][i])`; `hidden[l + 1][i]` mixes `hidden[l][i]` with all of
//! `kv[l][0..=i]`, in order. So the next token depends on each slot of each layer, as attention's would.

use baton_scheduler::RowSampling;

/// Start of an attention over no slots.
pub(crate) const EMPTY: u64 = 0x243f_6a88_85a3_08d3;

/// Mixes two words (the finalizer of SplitMix64 over their combination).
pub(crate) const fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

pub(crate) const fn embed(token: u32) -> u64 {
    mix(EMPTY, token as u64)
}

pub(crate) const fn kv(layer: usize, position: usize, hidden: u64) -> u64 {
    mix(mix(layer as u64, position as u64), hidden)
}

/// The token drawn from the last layer's output of one position: a function of that and (seed, sequence, position) alone.
pub(crate) const fn draw(hidden: u64, sampling: &RowSampling, vocab: u32) -> u32 {
    let random = mix(mix(sampling.params.seed, sampling.sequence as u64), sampling.position as u64);
    (mix(hidden, random) % vocab as u64) as u32
}

/// Everything that the next token depends on, kept while tokens are added one by one.
struct Run {
    /// Of each layer, what the last position attended to.
    attended: Vec<u64>,
    num_tokens: usize,
    /// The last layer's output of the last position.
    hidden: u64,
}

impl Run {
    fn new(num_layers: usize) -> Self {
        Self { attended: vec![EMPTY; num_layers], num_tokens: 0, hidden: EMPTY }
    }

    fn push(&mut self, token: u32) {
        self.hidden = embed(token);
        for (layer, attended) in self.attended.iter_mut().enumerate() {
            *attended = mix(*attended, kv(layer, self.num_tokens, self.hidden));
            self.hidden = mix(self.hidden, *attended);
        }
        self.num_tokens += 1;
    }
}

/// The token that follows `tokens` in an undisturbed run. `tokens` must not be empty; `vocab` is at least 1.
pub fn pseudo_token(tokens: &[u32], sampling: &RowSampling, num_layers: usize, vocab: u32) -> u32 {
    let mut run = Run::new(num_layers);
    tokens.iter().for_each(|token| run.push(*token));
    draw(run.hidden, sampling, vocab.max(1))
}

/// The first `max_new_tokens` tokens that follow `prompt`, up to and including the first of `stop_tokens`: what any run of the
/// request must deliver, however it is cut, moved or resumed. `sampling.position` is ignored.
pub fn pseudo_tokens(
    prompt: &[u32],
    sampling: &RowSampling,
    shape: (usize, u32),
    max_new_tokens: u32,
    stop_tokens: &[u32],
) -> Vec<u32> {
    let (num_layers, vocab) = shape;
    let mut run = Run::new(num_layers);
    prompt.iter().for_each(|token| run.push(*token));
    let mut tokens = Vec::new();
    for _ in 0..max_new_tokens {
        let position = u32::try_from(run.num_tokens).unwrap_or(u32::MAX);
        let token = draw(run.hidden, &RowSampling { position, ..*sampling }, vocab.max(1));
        tokens.push(token);
        if stop_tokens.contains(&token) {
            break;
        }
        run.push(token);
    }
    tokens
}
