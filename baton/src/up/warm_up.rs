//! The proof that a cluster serves: a real chat, through every process of it.

use serde_json::json;

use crate::client::Client;
use crate::exit::Failure;

/// Two tokens: the first comes from where the prompt was computed, the second from where its KV went.
const TOKENS: u32 = 2;

/// Chats once; says what came out.
///
/// # Errors
/// [`Failure::Worker`] when the cluster does not answer.
pub(super) async fn chat(base: &str) -> Result<String, Failure> {
    let client = Client::new(base)?;
    let body = json!({
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": true,
        "ignore_eos": true,
        "stream_options": {"include_usage": true},
    });
    let failed =
        |error: crate::client::ClientError| Failure::Worker(format!("the warm-up chat failed: {error}"));
    let mut events = client.stream("/v1/chat/completions", &body).await.map_err(failed)?;
    let mut outcome = "a chat of two tokens".to_owned();
    while let Some(chunk) = events.next().await.map_err(failed)? {
        if let Some(report) = chunk.baton {
            outcome = format!("a chat of two tokens, {}", report.mode);
            if let Some(ttft_ms) = report.ttft_ms {
                outcome.push_str(&format!(", TTFT {ttft_ms:.0} ms"));
            }
            if let Some(kv) = report.kv {
                outcome.push_str(&format!(
                    ", {:.1} KiB of KV in {:.1} ms",
                    kv.bytes as f64 / 1024.0,
                    kv.total_ms
                ));
            }
        }
    }
    Ok(outcome)
}
