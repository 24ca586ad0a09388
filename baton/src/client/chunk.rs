//! What is read of the events of a stream.

use serde::Deserialize;

/// One event of a streamed chat or completion.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Chunk {
    /// The choices; one here, or none in the event that carries usage.
    pub(crate) choices: Vec<Choice>,
    /// Token counts, in the last event.
    pub(crate) usage: Option<Usage>,
    /// What the handoff cost, in the last event.
    pub(crate) baton: Option<Report>,
    /// Set when the stream failed after it began.
    pub(crate) error: Option<ErrorBody>,
}

impl Chunk {
    /// Text this event adds.
    pub(crate) fn text(&self) -> &str {
        let choice = self.choices.first();
        let delta =
            choice.and_then(|choice| choice.delta.as_ref()).and_then(|delta| delta.content.as_deref());
        delta.or_else(|| choice.and_then(|choice| choice.text.as_deref())).unwrap_or("")
    }

    /// Tokens this event carries, where the router was asked to say.
    pub(crate) fn num_tokens(&self) -> usize {
        self.choices.first().and_then(|choice| choice.token_ids.as_ref()).map_or(0, Vec::len)
    }
}

/// One choice.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Delta {
    content: Option<String>,
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Usage {
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u64,
    /// Tokens of the answer.
    pub(crate) completion_tokens: u64,
}

/// The router's own account of a request.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Report {
    /// `disaggregated`, `local` or `colocated`.
    pub(crate) mode: String,
    /// Time to the first token, at the router.
    pub(crate) ttft_ms: Option<f64>,
    /// The transfer, if there was one.
    pub(crate) kv: Option<KvReport>,
}

/// One transfer of KV.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct KvReport {
    /// Payload bytes.
    pub(crate) bytes: u64,
    /// From the first frame to the last one verified.
    pub(crate) total_ms: f64,
    /// The part of it that decoding had to wait for.
    pub(crate) exposed_ms: f64,
}

/// An OpenAI-shaped error.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ErrorBody {
    /// One line for a person.
    pub(crate) message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_and_completion_events_are_read_alike() {
        let chat: Chunk = serde_json::from_str(
            r#"{"object":"x","choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":null}]}"#,
        )
        .unwrap();
        assert_eq!((chat.text(), chat.num_tokens()), ("Hi", 0));
        let completion: Chunk =
            serde_json::from_str(r#"{"choices":[{"text":"ab","token_ids":[1,2]}],"usage":null}"#).unwrap();
        assert_eq!((completion.text(), completion.num_tokens()), ("ab", 2));
    }

    #[test]
    fn the_last_event_accounts_for_the_transfer() {
        let text = r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9},
            "baton":{"mode":"disaggregated","ttft_ms":12.5,"kv":{"bytes":4096,"total_ms":3.5,"exposed_ms":0.25}}}"#;
        let chunk: Chunk = serde_json::from_str(text).unwrap();
        assert_eq!(chunk.usage, Some(Usage { prompt_tokens: 3, completion_tokens: 9 }));
        let kv = chunk.baton.unwrap().kv.unwrap();
        assert_eq!(kv, KvReport { bytes: 4096, total_ms: 3.5, exposed_ms: 0.25 });
    }
}
