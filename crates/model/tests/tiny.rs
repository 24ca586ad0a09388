//! The built-in model, judged by a plain forward pass.

#[path = "support/forward.rs"]
mod forward;

use baton_model::{Model, ModelSource};
use forward::Runner;

/// Greedy tokens after a prompt of bytes, and the logits' standard deviation over all steps.
fn generate(prompt: &str, num_tokens: usize) -> (Vec<u32>, f64) {
    let model = Model::open(&ModelSource::Tiny).unwrap();
    let mut runner = Runner::new(&model);
    let mut logits = Vec::new();
    for byte in prompt.bytes() {
        logits = runner.step(u32::from(byte));
    }
    let mut tokens = Vec::new();
    let mut squares = 0.0;
    for _ in 0..num_tokens {
        squares += logits.iter().map(|logit| logit * logit).sum::<f64>() / logits.len() as f64;
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32;
        tokens.push(best);
        logits = runner.step(best);
    }
    (tokens, (squares / num_tokens as f64).sqrt())
}

const PROMPTS: [&str; 4] = ["Hello", "Jello", "The capital of France is", "The capital of Greece is"];

#[test]
fn it_has_the_shape_it_should_have() {
    let model = Model::tiny();
    let config = &model.config;
    assert_eq!((config.num_layers, config.hidden, config.ffn), (4, 64, 128));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (4, 2, 16));
    assert_eq!((config.vocab, config.context), (288, 131_072));
    assert_eq!((config.bos, config.eos.as_slice()), (Some(256), [257, 259].as_slice()));
    assert!(model.has_tensor("output.weight") && !config.tied_embedding);
    assert_eq!(
        model.weights_bytes(),
        4 * (2 * 288 * 64 + 64 + 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 128))
    );
}

#[test]
fn it_is_the_same_everywhere() {
    let hex: String = Model::tiny().digest.iter().map(|byte| format!("{byte:02x}")).collect();
    // Changes only with a deliberate change of the generator, which invalidates recorded outputs.
    assert_eq!(hex, "81e1cf706de9e7925051e77d01831c5d37a7d07f5c9c34c7c3a062258cd4f7f4");
}

#[test]
fn greedy_text_varies_with_the_prompt_and_within_itself() {
    let outputs: Vec<Vec<u32>> = PROMPTS
        .iter()
        .map(|prompt| {
            let (tokens, deviation) = generate(prompt, 48);
            let text: String = tokens.iter().map(|&id| u8::try_from(id).map_or('_', char::from)).collect();
            println!("{prompt:?}: deviation {deviation:.2}, {text:?}");
            assert!((2.0..3.0).contains(&deviation), "logits of {prompt:?} deviate by {deviation}");
            tokens
        })
        .collect();
    for (index, tokens) in outputs.iter().enumerate() {
        let mut distinct = tokens.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() >= 12, "{:?} is answered with only {} tokens", PROMPTS[index], distinct.len());
        for other in &outputs[..index] {
            let equal = tokens.iter().zip(other).filter(|(a, b)| a == b).count();
            assert!(equal < 24, "{equal} of 48 tokens agree");
        }
    }
}
