//! The default model's tokenizer against recorded ids and texts of another implementation.

use std::path::Path;

use baton_model::testing::model_or_skip;
use baton_text::{Message, TextModel};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    prompts: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    /// Absent where the prompt was made of ids.
    prompt: Option<String>,
    prompt_tokens: Vec<u32>,
    greedy_tokens: Vec<u32>,
    /// The greedy tokens as text, special tokens written out.
    text: String,
}

fn golden() -> Golden {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/smollm2-135m-q4_1.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn prompts_have_the_recorded_ids() {
    let Some(model) = model_or_skip("prompts_have_the_recorded_ids") else { return };
    let text = TextModel::open(&model).unwrap();
    let golden = golden();
    assert_eq!(golden.prompts.len(), 12);
    let mut num_checked = 0;
    for case in &golden.prompts {
        let written = |ids: &[u32]| {
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| text.token_bytes(id)).copied().collect();
            String::from_utf8(bytes).unwrap()
        };
        // A prompt given as ids is checked by way of its text.
        let prompt = case.prompt.clone().unwrap_or_else(|| written(&case.prompt_tokens));
        assert_eq!(text.encode(&prompt, false).unwrap(), case.prompt_tokens, "{}", case.name);
        assert_eq!(text.encode(&prompt, true).unwrap(), case.prompt_tokens, "{}: no BOS here", case.name);
        assert_eq!(written(&case.prompt_tokens), prompt, "{}", case.name);
        num_checked += 1;
    }
    assert_eq!(num_checked, 12);
}

#[test]
fn answers_have_the_recorded_text_whole_and_streamed() {
    let Some(model) = model_or_skip("answers_have_the_recorded_text") else { return };
    let text = TextModel::open(&model).unwrap();
    for case in golden().prompts {
        let bytes: Vec<u8> =
            case.greedy_tokens.iter().flat_map(|&id| text.token_bytes(id)).copied().collect();
        assert_eq!(String::from_utf8_lossy(&bytes), case.text, "{}", case.name);
        let whole = text.decode(&case.greedy_tokens);
        let mut detokenizer = text.detokenizer();
        let mut streamed: String = case.greedy_tokens.iter().filter_map(|&id| detokenizer.push(id)).collect();
        streamed.extend(detokenizer.flush());
        assert_eq!(streamed, whole, "{}", case.name);
        assert!(!whole.contains("<|im_end|>") && !whole.contains("<|endoftext|>"), "{whole}");
    }
}

#[test]
fn a_chat_renders_to_the_recorded_prompt() {
    let Some(model) = model_or_skip("a_chat_renders_to_the_recorded_prompt") else { return };
    let text = TextModel::open(&model).unwrap();
    assert!(text.has_chat_template());
    let golden = golden();
    let case = golden.prompts.iter().find(|case| case.name == "chat-poem").unwrap();
    let messages = [Message::new("user", "Write a short poem about the sea.")];
    let rendered = text.chat(&messages, true).unwrap();
    assert_eq!(Some(&rendered), case.prompt.as_ref());
    assert_eq!(text.encode(&rendered, false).unwrap(), case.prompt_tokens);
    let open_ended = text.chat(&messages, false).unwrap();
    assert_eq!(format!("{open_ended}<|im_start|>assistant\n"), rendered);
}

#[test]
fn korean_and_emoji_stream_without_broken_characters() {
    let Some(model) = model_or_skip("korean_and_emoji_stream") else { return };
    let text = TextModel::open(&model).unwrap();
    let sample = "안녕하세요, 세계! 👩‍👩‍👧‍👦 café ☕️ 東京";
    let ids = text.encode(sample, false).unwrap();
    let mut detokenizer = text.detokenizer();
    let pieces: Vec<String> = ids.iter().filter_map(|&id| detokenizer.push(id)).collect();
    assert!(pieces.len() < ids.len(), "the sample has characters cut between tokens");
    assert_eq!(pieces.concat(), sample);
    assert_eq!(detokenizer.flush(), None);
    assert_eq!(text.vocab_size(), 49_152);
}

#[test]
fn long_and_monotonous_text_is_encoded_whole_and_in_time() {
    let Some(model) = model_or_skip("long_and_monotonous_text") else { return };
    let text = TextModel::open(&model).unwrap();
    let mixed = "The quick brown fox, 12 jumps; 東京 👍\n".repeat(3000);
    for sample in
        ["a".repeat(100_000), " ".repeat(100_000), "\n \t".repeat(30_000), "7".repeat(100_000), mixed]
    {
        let started = std::time::Instant::now();
        let ids = text.encode(&sample, false).unwrap();
        println!("{} bytes, {} tokens, {:?}", sample.len(), ids.len(), started.elapsed());
        assert_eq!(text.decode(&ids), sample);
        // Two orders above what it takes; quadratic work would not make it.
        assert!(started.elapsed().as_secs() < 20, "{:?} for {:?}...", started.elapsed(), &sample[..1]);
    }
}
