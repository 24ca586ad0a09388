//! The JSON shapes of answers.

use std::time::{SystemTime, UNIX_EPOCH};

use baton_handoff::{FinishReason, RequestId};
use serde_json::{Map, Value, json};

use crate::ask::Form;
use crate::request::{Operation, Summary, Usage, finish_name};

/// Which of the two paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Face {
    Chat,
    Completion,
}

impl Face {
    /// What is done there.
    pub(super) const fn operation(self) -> Operation {
        match self {
            Self::Chat => Operation::Chat,
            Self::Completion => Operation::TextCompletion,
        }
    }
}

/// What all objects of one answer have in common.
pub(super) struct Shape {
    face: Face,
    form: Form,
    id: String,
    created: u64,
    model: String,
}

/// One whole choice.
#[derive(Default)]
pub(super) struct Choice {
    pub(super) text: String,
    pub(super) token_ids: Vec<u32>,
    pub(super) reason: Option<FinishReason>,
}

impl Shape {
    pub(super) fn new(face: Face, form: Form, request: RequestId, model: String) -> Self {
        let prefix = match face {
            Face::Chat => "chatcmpl",
            Face::Completion => "cmpl",
        };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { face, form, id: format!("{prefix}-{request}"), created, model }
    }

    fn object(&self, kind: &str, choices: Value) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("id".to_owned(), json!(self.id));
        object.insert("object".to_owned(), json!(kind));
        object.insert("created".to_owned(), json!(self.created));
        object.insert("model".to_owned(), json!(self.model));
        object.insert("choices".to_owned(), choices);
        object
    }

    /// A whole answer.
    pub(super) fn whole(&self, choices: &[Choice], summary: &Summary) -> Value {
        let choices: Vec<Value> =
            choices.iter().enumerate().map(|(index, choice)| self.whole_choice(index, choice)).collect();
        let kind = match self.face {
            Face::Chat => "chat.completion",
            Face::Completion => "text_completion",
        };
        let mut object = self.object(kind, json!(choices));
        object.insert("usage".to_owned(), usage(&summary.usage));
        object.insert("baton".to_owned(), baton(summary));
        Value::Object(object)
    }

    fn whole_choice(&self, index: usize, choice: &Choice) -> Value {
        let mut value =
            json!({"index": index, "logprobs": null, "finish_reason": choice.reason.map(finish_name)});
        match self.face {
            Face::Chat => value["message"] = json!({"role": "assistant", "content": choice.text}),
            Face::Completion => value["text"] = json!(choice.text),
        }
        if self.form.return_token_ids {
            value["token_ids"] = json!(choice.token_ids);
        }
        value
    }

    /// The first chunk of a choice of a chat: its role. Completions have none.
    pub(super) fn role_chunk(&self, index: u32) -> Option<Value> {
        let role = || json!({"role": "assistant", "content": ""});
        (self.face == Face::Chat).then(|| self.chunk(index, role(), None, &[]))
    }

    /// A chunk of text; `None` when it would say nothing.
    pub(super) fn text_chunk(&self, index: u32, text: &str, token_ids: &[u32]) -> Option<Value> {
        let says = !text.is_empty() || (self.form.return_token_ids && !token_ids.is_empty());
        says.then(|| match self.face {
            Face::Chat => self.chunk(index, json!({"content": text}), None, token_ids),
            Face::Completion => self.chunk(index, json!(text), None, token_ids),
        })
    }

    /// The last chunk of a choice: its reason.
    pub(super) fn finish_chunk(&self, index: u32, reason: FinishReason) -> Value {
        let empty = match self.face {
            Face::Chat => json!({}),
            Face::Completion => json!(""),
        };
        self.chunk(index, empty, Some(finish_name(reason)), &[])
    }

    /// The last chunks of all: the reason of the choice that ended last, then, if asked for, usage. What the request cost
    /// is on the very last one.
    pub(super) fn last_chunks(&self, summary: &Summary) -> Vec<Value> {
        let mut chunks = vec![self.finish_chunk(summary.index, summary.reason)];
        if self.form.include_usage {
            let mut object = self.object(self.chunk_kind(), json!([]));
            object.insert("usage".to_owned(), usage(&summary.usage));
            chunks.push(Value::Object(object));
        }
        if let Some(Value::Object(last)) = chunks.last_mut() {
            last.insert("baton".to_owned(), baton(summary));
        }
        chunks
    }

    fn chunk_kind(&self) -> &'static str {
        match self.face {
            Face::Chat => "chat.completion.chunk",
            Face::Completion => "text_completion",
        }
    }

    fn chunk(&self, index: u32, says: Value, reason: Option<&str>, token_ids: &[u32]) -> Value {
        let field = match self.face {
            Face::Chat => "delta",
            Face::Completion => "text",
        };
        let mut choice = json!({"index": index, "logprobs": null, "finish_reason": reason});
        choice[field] = says;
        if self.form.return_token_ids {
            choice["token_ids"] = json!(token_ids);
        }
        let mut object = self.object(self.chunk_kind(), json!([choice]));
        if self.form.include_usage {
            object.insert("usage".to_owned(), Value::Null);
        }
        Value::Object(object)
    }
}

fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}

/// How it ran and what its transfers cost; figures are 0 when no KV moved.
fn baton(summary: &Summary) -> Value {
    let kv = summary.kv.unwrap_or_default();
    let kv = json!({
        "bytes": kv.bytes,
        "total_ms": kv.total_ms,
        "hidden_ms": kv.hidden_ms(),
        "exposed_ms": kv.exposed_ms,
    });
    json!({"mode": summary.mode.name(), "ttft_ms": summary.ttft_ms, "kv": kv})
}
