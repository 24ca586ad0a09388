//! Tokenizers of every kind against the ids that the Python library, which transformers runs on, gives a corpus of
//! code, scripts, emoji and white space. `tests/fixtures/README.md` says how they were made.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use baton_model::testing::model_or_skip;
use baton_model::{GgufTokenizer, Model, TokenType, TokenizerSource};
use baton_text::TextModel;
use serde::Deserialize;

/// Byte-level BPE; there is a GGUF pre-tokenizer of each name.
const KINDS: [&str; 4] = ["smollm", "gpt-2", "llama-bpe", "qwen2"];

#[derive(Deserialize)]
struct Corpus {
    texts: Vec<String>,
}

#[derive(Deserialize)]
struct Ids {
    /// Of each text: the ids, and where they differ, those with special tokens added.
    ids: Vec<Vec<Vec<u32>>>,
}

#[derive(Deserialize)]
struct Json {
    added_tokens: Vec<Added>,
    model: Bpe,
}

#[derive(Deserialize)]
struct Added {
    id: usize,
    content: String,
    special: bool,
}

#[derive(Deserialize)]
struct Bpe {
    vocab: BTreeMap<String, usize>,
    merges: Vec<(String, String)>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> T {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap()
}

fn texts() -> Vec<String> {
    let corpus: Corpus = read(&folder().join("corpus.json"));
    assert!(corpus.texts.len() > 100);
    corpus.texts
}

fn open(source: TokenizerSource) -> TextModel {
    let mut model = Model::tiny();
    model.tokenizer = source;
    model.config.vocab = 1024;
    model.config.bos = None;
    TextModel::open(&model).unwrap()
}

/// Every text of the corpus has the recorded ids; returns how many have others with special tokens added.
fn check(name: &str, text: &TextModel, with_special: bool) -> usize {
    let recorded: Ids = read(&folder().join("tokenizers").join(name).join("ids.json"));
    let texts = texts();
    assert_eq!(texts.len(), recorded.ids.len());
    let mut num_special = 0;
    for (sample, recorded) in texts.iter().zip(&recorded.ids) {
        assert_eq!(text.encode(sample, false).unwrap(), recorded[0], "{name}: {sample:?}");
        if with_special {
            assert_eq!(&text.encode(sample, true).unwrap(), recorded.last().unwrap(), "{name}: {sample:?}");
        }
        num_special += usize::from(recorded.len() > 1);
    }
    num_special
}

#[test]
fn a_tokenizer_json_gives_the_recorded_ids() {
    for name in KINDS.into_iter().chain(["llama-2"]) {
        let num_special = check(name, &open_json(name), true);
        let adds_tokens = ["llama-bpe", "llama-2"].contains(&name);
        assert_eq!(num_special > 0, adds_tokens, "{name}");
    }
}

fn open_json(name: &str) -> TextModel {
    open(TokenizerSource::Json(folder().join("tokenizers").join(name).join("tokenizer.json")))
}

/// The same vocabulary as a GGUF file holds it.
fn as_gguf(name: &str) -> GgufTokenizer {
    let json: Json = read(&folder().join("tokenizers").join(name).join("tokenizer.json"));
    let num_tokens =
        json.model.vocab.values().copied().chain(json.added_tokens.iter().map(|t| t.id)).max().unwrap() + 1;
    let mut tokens = vec![String::new(); num_tokens];
    let mut token_types = vec![TokenType::Normal; num_tokens];
    for (token, id) in json.model.vocab {
        tokens[id] = token;
    }
    for added in json.added_tokens {
        token_types[added.id] = if added.special { TokenType::Control } else { TokenType::UserDefined };
        tokens[added.id] = added.content;
    }
    GgufTokenizer {
        model: "gpt2".to_owned(),
        pre: name.to_owned(),
        tokens,
        token_types,
        merges: json.model.merges.into_iter().map(|(left, right)| format!("{left} {right}")).collect(),
        ..GgufTokenizer::default()
    }
}

#[test]
fn the_pre_tokenizers_of_gguf_files_give_the_recorded_ids() {
    for name in KINDS {
        check(name, &open(TokenizerSource::Gguf(Box::new(as_gguf(name)))), false);
    }
}

#[test]
fn the_corpus_tells_the_kinds_apart() {
    // If two kinds agreed on everything, a test of one would pass with the other's rules.
    let ids = |pre: &str| {
        let text =
            open(TokenizerSource::Gguf(Box::new(GgufTokenizer { pre: pre.to_owned(), ..as_gguf("gpt-2") })));
        texts().iter().map(|sample| text.encode(sample, false).unwrap()).collect::<Vec<_>>()
    };
    let all = KINDS.map(ids);
    for (index, one) in all.iter().enumerate() {
        for (name, other) in KINDS.iter().zip(&all).take(index) {
            let num_different = one.iter().zip(other).filter(|(a, b)| a != b).count();
            assert!(num_different >= 5, "{} and {name} differ on {num_different} texts", KINDS[index]);
        }
    }
}

#[test]
fn ids_decode_to_their_text() {
    for name in KINDS {
        let text = open(TokenizerSource::Gguf(Box::new(as_gguf(name))));
        for sample in texts().iter().filter(|sample| !sample.contains("<|")) {
            let decoded = text.decode(&text.encode(sample, false).unwrap());
            // qwen2 composes: what comes back is another writing of the same text, which composes to the same ids.
            assert!(decoded == *sample || name == "qwen2", "{name}: {sample:?} became {decoded:?}");
            assert_eq!(text.encode(&decoded, false).unwrap(), text.encode(sample, false).unwrap());
        }
    }
    let text = open_json("llama-2");
    for sample in texts() {
        assert_eq!(text.decode(&text.encode(&sample, true).unwrap()), sample);
    }
}

#[test]
fn the_default_models_vocabulary_gives_the_recorded_ids() {
    let Some(model) = model_or_skip("the_default_models_vocabulary_gives_the_recorded_ids") else { return };
    check("smollm2-135m", &TextModel::open(&model).unwrap(), true);
}
