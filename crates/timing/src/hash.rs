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

/// The token that follows `tokens` in an undisturbed run. `tokens` must not be empty; `vocab` is at least 1.
pub fn pseudo_token(tokens: &[u32], sampling: &RowSampling, num_layers: usize, vocab: u32) -> u32 {
    let mut hidden: Vec<u64> = tokens.iter().map(|token| embed(*token)).collect();
    for layer in 0..num_layers {
        let mut attended = EMPTY;
        for (position, hidden) in hidden.iter_mut().enumerate() {
            attended = mix(attended, kv(layer, position, *hidden));
            *hidden = mix(*hidden, attended);
        }
    }
    draw(hidden.last().copied().unwrap_or(EMPTY), sampling, vocab.max(1))
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
    let mut tokens = prompt.to_vec();
    for _ in 0..max_new_tokens {
        let position = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let token = pseudo_token(&tokens, &RowSampling { position, ..*sampling }, num_layers, vocab);
        tokens.push(token);
        if stop_tokens.contains(&token) {
            break;
        }
    }
    tokens.split_off(prompt.len())
}
