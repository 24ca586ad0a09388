//! Fields that are known elsewhere and not supported here: a value that changes nothing is accepted, any other is
//! refused, so that no request is silently answered as if it had asked for less.

use serde_json::Value;

/// What a field that is not supported may hold.
#[derive(Clone, Copy, Debug)]
pub(super) enum Accepted {
    /// Anything: it never changes an answer.
    Anything,
    /// One of these JSON values, or null.
    Only(&'static [&'static str]),
}

impl Accepted {
    pub(super) fn allows(self, value: &Value) -> bool {
        match self {
            Self::Anything => true,
            Self::Only(texts) => texts
                .iter()
                .any(|text| serde_json::from_str::<Value>(text).is_ok_and(|neutral| same(&neutral, value))),
        }
    }

    /// What would have been accepted.
    pub(super) fn describe(self) -> String {
        match self {
            Self::Anything => "any value is accepted".to_owned(),
            Self::Only([]) => "leave it out".to_owned(),
            Self::Only(texts) => format!("leave it out, or send {}", texts.join(" or ")),
        }
    }
}

/// 0 and 0.0 are the same number.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

const FIELDS: &[(&str, Accepted)] = {
    use Accepted::{Anything, Only};
    &[
        // Labels and hints.
        ("user", Anything),
        ("metadata", Anything),
        ("safety_identifier", Anything),
        ("prompt_cache_key", Anything),
        ("service_tier", Only(&["\"auto\"", "\"default\""])),
        ("store", Only(&["false"])),
        // Log-probabilities.
        ("logprobs", Only(&["false"])),
        ("top_logprobs", Only(&["0"])),
        ("prompt_logprobs", Only(&[])),
        ("echo", Only(&["false"])),
        // Sampling.
        ("frequency_penalty", Only(&["0"])),
        ("presence_penalty", Only(&["0"])),
        ("repetition_penalty", Only(&["1"])),
        ("length_penalty", Only(&["1"])),
        ("logit_bias", Only(&["{}"])),
        ("top_k", Only(&["0", "-1"])),
        ("min_p", Only(&["0"])),
        ("min_tokens", Only(&["0"])),
        ("best_of", Only(&["1"])),
        ("use_beam_search", Only(&["false"])),
        ("stop_token_ids", Only(&["[]"])),
        ("bad_words", Only(&["[]"])),
        ("allowed_token_ids", Only(&[])),
        // Text.
        ("suffix", Only(&[])),
        ("include_stop_str_in_output", Only(&["false"])),
        ("skip_special_tokens", Only(&["true"])),
        ("spaces_between_special_tokens", Only(&["true"])),
        ("add_generation_prompt", Only(&["true"])),
        ("continue_final_message", Only(&["false"])),
        ("truncate_prompt_tokens", Only(&[])),
        ("chat_template", Only(&[])),
        ("chat_template_kwargs", Only(&["{}"])),
        ("documents", Only(&["[]"])),
        ("return_tokens_as_token_ids", Only(&["false"])),
        // Structure and tools.
        ("response_format", Only(&["{\"type\":\"text\"}"])),
        ("structured_outputs", Only(&[])),
        ("guided_json", Only(&[])),
        ("guided_regex", Only(&[])),
        ("guided_choice", Only(&[])),
        ("guided_grammar", Only(&[])),
        ("tools", Only(&["[]"])),
        ("tool_choice", Only(&["\"none\"", "\"auto\""])),
        ("parallel_tool_calls", Only(&["true", "false"])),
        ("functions", Only(&["[]"])),
        ("function_call", Only(&["\"none\"", "\"auto\""])),
        ("modalities", Only(&["[\"text\"]"])),
        ("audio", Only(&[])),
        ("prediction", Only(&[])),
        ("reasoning_effort", Only(&[])),
        ("verbosity", Only(&[])),
        ("web_search_options", Only(&[])),
        // Serving.
        ("cache_salt", Only(&[])),
        ("kv_transfer_params", Only(&[])),
    ]
};

pub(super) fn accepted(name: &str) -> Option<Accepted> {
    FIELDS.iter().find(|(known, _)| *known == name).map(|(_, accepted)| *accepted)
}

pub(super) fn is_known(name: &str) -> bool {
    accepted(name).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_neutral_value_is_json_and_every_name_stands_once() {
        for (index, (name, accepted)) in FIELDS.iter().enumerate() {
            assert!(!FIELDS[..index].iter().any(|(earlier, _)| earlier == name), "{name}");
            if let Accepted::Only(texts) = accepted {
                for text in *texts {
                    let value: Value = serde_json::from_str(text).expect(name);
                    assert!(accepted.allows(&value), "{name}");
                }
            }
        }
    }

    #[test]
    fn numbers_compare_by_value() {
        let penalty = accepted("presence_penalty").expect("known");
        assert!(penalty.allows(&serde_json::json!(0.0)) && penalty.allows(&serde_json::json!(0)));
        assert!(!penalty.allows(&serde_json::json!(0.1)) && !penalty.allows(&serde_json::json!(false)));
    }
}
