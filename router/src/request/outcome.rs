//! What a request's end is to its client, to metrics and to the log.

use std::time::Instant;

use baton_dispatch::{Mode, PlaceError, RequestEnd, RetryLimits};
use baton_handoff::Cause;

use super::outbox::Unheard;
use super::run::Run;
use super::{Summary, Usage, finish_name};
use crate::api_error::ApiError;
use crate::app::{shutting_down, unavailable};
use crate::fleet::Capacity;

impl Run<'_> {
    /// What the client hears at the end, behind all text.
    pub(super) fn result(&self, end: RequestEnd) -> Result<Summary, ApiError> {
        match (&self.unheard, end) {
            (Some(Unheard::Slow), _) => Err(ApiError::Failed { cause: Cause::SlowReader }),
            (_, RequestEnd::Cancelled) if self.app.cut.is_cancelled() => Err(shutting_down()),
            // Whoever leaves at the deadline leaves because of it.
            (Some(Unheard::Gone), _) | (None, RequestEnd::Cancelled) if self.deadline.is_over() => {
                Err(ApiError::DeadlineExceeded)
            }
            (Some(Unheard::Gone), _) | (None, RequestEnd::Cancelled) => {
                Err(ApiError::Failed { cause: Cause::Cancelled })
            }
            (None, RequestEnd::Finished) => self.summary(),
            (None, RequestEnd::Unplaced { error, retry_after_ms }) => {
                Err(self.unplaced(error, retry_after_ms))
            }
            (None, RequestEnd::Failed { cause: Cause::TooLarge, .. }) => Err(self.too_large()),
            (None, RequestEnd::Failed { cause, retry_after_ms }) => {
                Err(ApiError::from_cause(cause, retry_after_ms))
            }
        }
    }

    fn unplaced(&self, error: PlaceError, retry_after_ms: Option<u64>) -> ApiError {
        match error {
            PlaceError::NoWorker => {
                unavailable(format!("no worker can serve this now; missing: {}", self.missing()))
            }
            PlaceError::Saturated => ApiError::Shed { retry_after_ms: retry_after_ms.unwrap_or(1000) },
            PlaceError::TooLarge => self.too_large(),
        }
    }

    /// What is needed and what fits, so that the client knows what to ask for.
    fn too_large(&self) -> ApiError {
        let largest = self.app.fleet.largest().unwrap_or_default();
        too_large(self.prompt.len() as u64, self.max_new_tokens, self.num_sequences, largest)
    }

    fn missing(&self) -> String {
        let missing = self.app.fleet.missing();
        if missing.is_empty() {
            "a worker that has not failed this request".to_owned()
        } else {
            missing.join(", ")
        }
    }

    fn summary(&self) -> Result<Summary, ApiError> {
        let Some((index, reason)) = self.last else {
            return Err(ApiError::Internal("a request ended well without an end of its answer".to_owned()));
        };
        let num = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let prompt_tokens = num(self.prompt.len());
        Ok(Summary {
            index,
            reason,
            mode: self.placed.map_or(Mode::Local, |placed| placed.mode),
            usage: Usage {
                prompt_tokens,
                completion_tokens: num(self.answer.num_tokens()),
                cached_tokens: self.cached_tokens.min(prompt_tokens),
            },
            ttft_ms: self.answer.ttft_ms(),
            kv: self.kv,
        })
    }

    /// Counts and logs the end.
    pub(super) fn record(&mut self, result: &Result<Summary, ApiError>) {
        let outcome = match result {
            Ok(_) => finish_name(self.answer.reason()),
            Err(error) => error.code(),
        };
        let mode = self.placed.map_or("none", |placed| placed.mode.name());
        let reason = self.placed.map_or("none", |placed| placed.reason);
        let metrics = &self.app.metrics;
        metrics.request_ended(mode, outcome);
        metrics.retries.inc_by(u64::from(self.request.num_retries()));
        metrics.late_messages.add("router", self.request.ignored());
        self.warn_of_lost_workers();
        self.answer.observe_end(Instant::now(), metrics);
        let kept = self.judge(result);
        let spared = self.spared();
        self.describe(result, kept, spared);
        tracing::info!(
            mode,
            reason,
            outcome,
            prompt_tokens = self.prompt.len(),
            completion_tokens = self.answer.num_tokens(),
            num_sequences = self.num_sequences,
            cached_tokens = self.cached_tokens,
            ttft_ms = self.answer.ttft_ms(),
            num_retries = self.request.num_retries(),
            num_preemptions = self.num_preemptions,
            "request ended"
        );
        self.log_content();
    }

    /// The request is the likely reason for which they fell over, so it was not tried on another one.
    fn warn_of_lost_workers(&self) {
        let Some(RequestEnd::Failed { cause, .. }) = self.ended else { return };
        if self.lost.len() >= RetryLimits::default().max_workers_lost as usize {
            let workers = self.lost.values().map(String::as_str).collect::<Vec<_>>().join(", ");
            tracing::warn!(request_id = %self.id, workers, cause = cause.name(), "a request took workers down and is given up");
        }
    }

    fn log_content(&self) {
        if !baton_telemetry::log::content_enabled() {
            return;
        }
        let Ok(served) = self.app.served() else { return };
        let prompt = served.text.decode(&self.prompt);
        for (index, token_ids) in self.answer.choices().enumerate() {
            let completion = served.text.decode(token_ids);
            tracing::info!(prompt, index, completion, "request content");
        }
    }
}

fn too_large(prompt: u64, max_tokens: u32, n: u32, largest: Capacity) -> ApiError {
    let needed = prompt + u64::from(n) * u64::from(max_tokens);
    let (held, each) = (largest.tokens(), largest.answer_tokens(prompt, n));
    let needs = "the request needs KV memory for";
    let message = match n {
        0 | 1 => format!(
            "{needs} {needed} tokens (prompt {prompt}, answer {max_tokens}); the largest that fits on any worker is {held}"
        ),
        _ if each < u64::from(max_tokens) => format!(
            "{needs} {needed} tokens (prompt {prompt}, {n} answers of {max_tokens}); the largest that fits on any worker \
             is {held}, with {each} for each of {n} answers"
        ),
        _ => format!("no worker runs {n} sequences at once: ask for fewer answers"),
    };
    ApiError::TooLong { param: if n > 1 { "n" } else { "max_tokens" }, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_too_large_is_told_what_fits() {
        let largest = Capacity { blocks: 20, block_size: 16 };
        let says = |n, max_tokens| too_large(100, max_tokens, n, largest).to_string();
        let one = says(1, 221);
        assert!(one.contains(" 321 tokens") && one.ends_with("is 320"), "{one}");
        let two = says(2, 109);
        assert!(
            two.contains(" 318 tokens") && two.contains("is 320, with 108 for each of 2 answers"),
            "{two}"
        );
        assert!(says(2, 108).contains("no worker runs 2 sequences"));
    }
}
