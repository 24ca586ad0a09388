//! Detokenizer and stop strings against the plainest implementations of the same promises.

use std::sync::LazyLock;

use baton_model::Model;
use baton_text::{StopStrings, TextError, TextModel};
use proptest::prelude::*;

fn tiny() -> &'static TextModel {
    static TINY: LazyLock<TextModel> = LazyLock::new(|| TextModel::open(&Model::tiny()).unwrap());
    &TINY
}

/// What stop strings promise, by looking at every prefix of the whole text: the text delivered, and which stop string
/// ended it.
fn plain_stop(text: &str, stops: &[String]) -> (String, Option<usize>) {
    for end in text.char_indices().map(|(at, c)| at + c.len_utf8()) {
        let prefix = &text[..end];
        let complete = stops.iter().enumerate().filter(|(_, stop)| prefix.ends_with(stop.as_str()));
        // The longest; of equal ones the first.
        let longest = complete.max_by_key(|(index, stop)| (stop.len(), std::cmp::Reverse(*index)));
        if let Some((index, stop)) = longest {
            return (prefix[..end - stop.len()].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

/// Cuts between characters, from arbitrary numbers.
fn pieces<'a>(text: &'a str, cuts: &[usize]) -> Vec<&'a str> {
    let mut places: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
    places.retain(|place| text.is_char_boundary(*place));
    places.extend([0, text.len()]);
    places.sort_unstable();
    places.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// A few characters of every length in UTF-8, so that stop strings really occur and share their first bytes.
const ALPHABET: &str = "[abé中丮😀😁]";

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stop_strings_agree_with_the_plain_search(
        text in proptest::string::string_regex(&format!("{ALPHABET}{{0,24}}")).unwrap(),
        stops in prop::collection::vec(proptest::string::string_regex(&format!("{ALPHABET}{{1,5}}")).unwrap(), 0..4),
        cuts in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        let (expected, index) = plain_stop(&text, &stops);
        let mut watcher = StopStrings::new(&stops).unwrap();
        let mut delivered = String::new();
        let mut matched = None;
        for piece in pieces(&text, &cuts) {
            let step = watcher.push(piece);
            prop_assert!(matched.is_none() || step.text.is_empty(), "text after the end");
            delivered.push_str(&step.text);
            matched = matched.or(step.matched.map(|found| found.index));
            // Never past what the whole text allows, at any moment.
            prop_assert!(expected.starts_with(&delivered), "{delivered:?} leaked, allowed {expected:?}");
        }
        delivered.push_str(&watcher.flush());
        prop_assert_eq!(delivered, expected);
        prop_assert_eq!(matched, index);
        prop_assert_eq!(watcher.is_matched(), index.is_some());
    }

    /// Nothing is held back longer than needed: what is held is the start of some stop string.
    #[test]
    fn only_a_possible_stop_is_held_back(
        text in proptest::string::string_regex(&format!("{ALPHABET}{{0,24}}")).unwrap(),
        stop in proptest::string::string_regex(&format!("{ALPHABET}{{1,5}}")).unwrap(),
    ) {
        let mut watcher = StopStrings::new(&[&stop]).unwrap();
        let step = watcher.push(&text);
        let held = watcher.flush();
        prop_assert!(stop.starts_with(&held) && held.len() < stop.len());
        if step.matched.is_none() {
            prop_assert_eq!(step.text + &held, text);
        }
    }

    #[test]
    fn streamed_text_is_the_lossy_decoding_of_all_bytes(
        tokens in prop::collection::vec(prop_oneof![
            // Mostly pieces of real characters, some bytes that are none, some specials and ids that do not exist.
            4 => prop::sample::select("가나👍é".bytes().map(u32::from).collect::<Vec<_>>()),
            2 => 0..256u32,
            1 => 256..300u32,
        ], 0..40),
    ) {
        let text = tiny();
        let bytes: Vec<u8> = tokens.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
        let expected = String::from_utf8_lossy(&bytes);
        let mut detokenizer = text.detokenizer();
        let mut streamed = String::new();
        for &token in &tokens {
            streamed.extend(detokenizer.push(token));
            prop_assert!(expected.starts_with(&streamed), "{streamed:?} had to be taken back");
        }
        streamed.extend(detokenizer.flush());
        prop_assert_eq!(&streamed, &*expected);
        prop_assert_eq!(text.decode(&tokens), streamed);
    }

    #[test]
    fn any_text_survives_tokens_one_byte_each(sample in any::<String>()) {
        let text = tiny();
        let ids = text.encode(&sample, true).unwrap();
        let mut detokenizer = text.detokenizer();
        let streamed: String = ids.iter().filter_map(|&id| detokenizer.push(id)).collect();
        let broken = |text: &str| text.contains(char::REPLACEMENT_CHARACTER);
        prop_assert!(broken(&sample) || !broken(&streamed));
        if !sample.contains("<|") {
            prop_assert_eq!(streamed, sample);
            prop_assert_eq!(detokenizer.flush(), None);
        }
    }
}

#[test]
fn a_stop_among_chinese_characters_cuts_no_character() {
    let mut watcher = StopStrings::new(&["ZZZ"]).unwrap();
    let mut delivered = String::new();
    for piece in ["你好，", "世界Z", "Z界Z", "Z", "Z再见"] {
        delivered.push_str(&watcher.push(piece).text);
    }
    assert_eq!(delivered, "你好，世界ZZ界");
    assert!(watcher.is_matched());
    assert_eq!(watcher.flush(), "");
}

#[test]
fn no_prefix_of_the_stop_leaks_while_the_alphabet_streams() {
    let mut watcher = StopStrings::new(&["DEFGHIJ"]).unwrap();
    let mut delivered = Vec::new();
    for letter in 'A'..='Z' {
        delivered.push(watcher.push(&letter.to_string()).text);
    }
    assert_eq!(delivered.concat(), "ABC");
    // A stop that does not come to pass is delivered after all.
    let mut watcher = StopStrings::new(&["DEFGHIJ"]).unwrap();
    let steps: Vec<String> = "ABCDEFX".chars().map(|letter| watcher.push(&letter.to_string()).text).collect();
    assert_eq!(steps, ["A", "B", "C", "", "", "", "DEFX"]);
}

#[test]
fn of_stops_complete_at_once_the_longest_counts() {
    let mut watcher = StopStrings::new(&["END", "THE END"]).unwrap();
    let step = watcher.push("so: THE END.");
    assert_eq!((step.text.as_str(), step.matched.unwrap().index), ("so: ", 1));
}

#[test]
fn an_empty_stop_is_the_clients_error() {
    assert!(matches!(StopStrings::new(&["a", ""]), Err(TextError::EmptyStop)));
    let mut none = StopStrings::new::<&str>(&[]).unwrap();
    assert_eq!(none.push("anything").text, "anything");
}

#[test]
fn a_generation_that_ends_inside_a_character_says_so_once() {
    let text = tiny();
    let mut detokenizer = text.detokenizer();
    let pieces: Vec<_> = "ok👍".bytes().take(5).map(|byte| detokenizer.push(u32::from(byte))).collect();
    assert_eq!(pieces, [Some("o".to_owned()), Some("k".to_owned()), None, None, None]);
    assert_eq!(detokenizer.flush().as_deref(), Some("\u{fffd}"));
    assert_eq!(detokenizer.flush(), None);
}

#[test]
fn the_tiny_models_chat_uses_its_specials() {
    let text = tiny();
    let prompt = text.chat(&[baton_text::Message::new("user", "hi")], true).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let ids = text.encode(&prompt, false).unwrap();
    assert_eq!((ids[0], ids.iter().filter(|&&id| id == 259).count()), (258, 1));
    assert_eq!(text.decode(&ids), "user\nhi\nassistant\n");
    assert_eq!(text.vocab_size(), 288);
    // What only looks like a special is text.
    assert_eq!(text.decode(&text.encode("a <| b <|no|>", false).unwrap()), "a <| b <|no|>");
}

#[test]
fn plain_prompts_get_one_beginning_of_sequence_where_the_model_wants_it() {
    let mut model = Model::tiny();
    model.config.add_bos = true;
    let text = TextModel::open(&model).unwrap();
    assert_eq!(text.encode("a", true).unwrap(), [256, 97]);
    assert_eq!(text.encode("<|bos|>a", true).unwrap(), [256, 97], "not a second one");
    assert_eq!(text.encode("a", false).unwrap(), [97]);
    assert_eq!(tiny().encode("a", true).unwrap(), [97]);
}

#[test]
fn a_text_model_can_be_shared_between_threads() {
    fn is_shareable<T: Send + Sync>() {}
    is_shareable::<TextModel>();
}
