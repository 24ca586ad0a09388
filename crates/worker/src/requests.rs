//! What a worker checks of a request before anything is held for it. Routers check too; a worker trusts none.

use std::sync::Arc;
use std::time::Duration;

use baton_handoff::{HandoffKey, MAX_SEQUENCES, RequestId};
use baton_proto::v1;
use baton_scheduler::{Origin, SamplingParams};
use tonic::Status;

use crate::{LayerSink, RequestLimits, Submission};

/// Stop tokens of a request, at most.
pub const MAX_STOP_TOKENS: usize = 128;

/// Priorities of requests are from minus this to this.
pub const MAX_PRIORITY: i32 = 100;

/// Greatest age of a request.
const MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Longest time that a request may have left.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// The parts of a Prefill or Decode call that both have, on the wire.
pub struct WireLeg {
    /// The key.
    pub key: Option<v1::HandoffKey>,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Option<v1::Sampling>,
    /// When to stop.
    pub stopping: Option<v1::Stopping>,
    /// Tokens at the prompt's end that were generated in earlier attempts.
    pub num_generated: u32,
    /// What else is known of the request; absent: one sequence of a new request without preference.
    pub terms: Option<v1::Terms>,
}

/// The same, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct LegRequest {
    /// The key.
    pub key: HandoffKey,
    /// Prompt tokens, at least one, each below the vocabulary's size.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Tokens to generate, at least one.
    pub max_new_tokens: u32,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// Tokens at the prompt's end that were generated in earlier attempts; fewer than the prompt has.
    pub num_generated: u32,
    /// Sequences to generate, 1 to [`MAX_SEQUENCES`]; more than one only without tokens generated earlier.
    pub num_sequences: u32,
    /// Number of the first within the request; all of them are below [`MAX_SEQUENCES`].
    pub first_sequence: u32,
    /// How long ago the router accepted the request.
    pub age: Duration,
    /// From minus [`MAX_PRIORITY`] to [`MAX_PRIORITY`]; a lower one is served earlier.
    pub priority: i32,
    /// Whether its blocks are looked up in, and added to, the prefix cache.
    pub cache: bool,
    /// It was preempted and comes back.
    pub preempted: bool,
    /// Time that the request has left, from when the call came in; then the leg ends by itself.
    pub timeout: Option<Duration>,
}

impl LegRequest {
    /// Checks everything that does not depend on load.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` that names the field and the limit.
    pub fn check(wire: WireLeg, limits: &RequestLimits) -> Result<Self, Status> {
        let key = key(wire.key)?;
        let stopping = wire.stopping.ok_or_else(|| missing("stopping"))?;
        if stopping.max_new_tokens == 0 {
            return Err(invalid("stopping.max_new_tokens", "is 0, the least is 1"));
        }
        if stopping.stop_token_ids.len() > MAX_STOP_TOKENS {
            let what =
                format!("has {} entries, the limit is {MAX_STOP_TOKENS}", stopping.stop_token_ids.len());
            return Err(invalid("stopping.stop_token_ids", &what));
        }
        check_prompt(&wire.prompt, limits)?;
        if wire.num_generated as usize >= wire.prompt.len() {
            let what = format!(
                "is {}, it must be less than the prompt's {} tokens",
                wire.num_generated,
                wire.prompt.len()
            );
            return Err(invalid("num_generated", &what));
        }
        let terms = wire.terms.unwrap_or_default();
        check_terms(&terms, wire.num_generated)?;
        Ok(Self {
            key,
            prompt: wire.prompt,
            sampling: sampling(wire.sampling.ok_or_else(|| missing("sampling"))?)?,
            max_new_tokens: stopping.max_new_tokens,
            stop_tokens: stopping.stop_token_ids,
            num_generated: wire.num_generated,
            num_sequences: terms.num_sequences.max(1),
            first_sequence: terms.first_sequence,
            age: Duration::from_millis(terms.age_ms),
            priority: terms.priority,
            cache: !terms.no_prefix_cache,
            preempted: terms.preempted,
            timeout: (terms.timeout_ms > 0).then(|| Duration::from_millis(terms.timeout_ms)),
        })
    }

    /// What the step loop is handed.
    pub fn submission(self, origin: Origin, sink: Option<Arc<dyn LayerSink>>) -> Submission {
        Submission {
            request: self.key.request,
            trace: None,
            origin,
            prompt: self.prompt,
            sampling: self.sampling,
            num_sequences: self.num_sequences,
            first_sequence: self.first_sequence,
            num_generated: self.num_generated,
            max_new_tokens: self.max_new_tokens,
            stop_tokens: self.stop_tokens,
            cache: self.cache,
            age: self.age,
            priority: self.priority,
            preempted: self.preempted,
            sink,
        }
    }
}

fn invalid(field: &str, what: &str) -> Status {
    Status::invalid_argument(format!("{field} {what}"))
}

fn missing(field: &str) -> Status {
    invalid(field, "is missing")
}

fn key(wire: Option<v1::HandoffKey>) -> Result<HandoffKey, Status> {
    let wire = wire.ok_or_else(|| missing("key"))?;
    let request = RequestId::from_slice(&wire.request).ok_or_else(|| {
        invalid("key.request", &format!("has {} bytes, it must have 16", wire.request.len()))
    })?;
    Ok(HandoffKey { request, group: wire.group, attempt: wire.attempt })
}

fn check_prompt(prompt: &[u32], limits: &RequestLimits) -> Result<(), Status> {
    if prompt.is_empty() {
        return Err(invalid("prompt", "is empty"));
    }
    // One token must be left to generate.
    if prompt.len() >= limits.context {
        let what = format!(
            "has {} tokens, and the context of {} must leave room for one more",
            prompt.len(),
            limits.context
        );
        return Err(invalid("prompt", &what));
    }
    if prompt.len() > limits.pool_tokens {
        let what =
            format!("has {} tokens, and this worker's KV memory holds {}", prompt.len(), limits.pool_tokens);
        return Err(invalid("prompt", &what));
    }
    match prompt.iter().position(|&id| id as usize >= limits.vocab) {
        Some(at) => {
            let what = format!("[{at}] is token {}, and the vocabulary has {}", prompt[at], limits.vocab);
            Err(Status::invalid_argument(format!("prompt{what}")))
        }
        None => Ok(()),
    }
}

fn check_terms(terms: &v1::Terms, num_generated: u32) -> Result<(), Status> {
    let v1::Terms { num_sequences, first_sequence, age_ms, priority, timeout_ms, .. } = *terms;
    let limit = MAX_SEQUENCES as u32;
    if num_sequences > limit {
        return Err(invalid("terms.num_sequences", &format!("is {num_sequences}, the limit is {limit}")));
    }
    if num_sequences > 1 && num_generated > 0 {
        let what = format!("is {num_sequences}, and with num_generated {num_generated} the limit is 1");
        return Err(invalid("terms.num_sequences", &what));
    }
    let last = limit - num_sequences.max(1);
    if first_sequence > last {
        let what =
            format!("is {first_sequence}, with {} sequences the limit is {last}", num_sequences.max(1));
        return Err(invalid("terms.first_sequence", &what));
    }
    if !(-MAX_PRIORITY..=MAX_PRIORITY).contains(&priority) {
        let what = format!("is {priority}, it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}");
        return Err(invalid("terms.priority", &what));
    }
    if Duration::from_millis(age_ms) > MAX_AGE {
        let what = format!("is {age_ms}, the limit is {}", MAX_AGE.as_millis());
        return Err(invalid("terms.age_ms", &what));
    }
    if Duration::from_millis(timeout_ms) > MAX_TIMEOUT {
        let what = format!("is {timeout_ms}, the limit is {}", MAX_TIMEOUT.as_millis());
        return Err(invalid("terms.timeout_ms", &what));
    }
    Ok(())
}

fn sampling(wire: v1::Sampling) -> Result<SamplingParams, Status> {
    let v1::Sampling { temperature, top_p, top_k, min_p, seed } = wire;
    // Written so that NaN fails too.
    if !(0.0..=1000.0).contains(&temperature) {
        return Err(invalid("sampling.temperature", &format!("is {temperature}, it must be from 0 to 1000")));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(invalid("sampling.top_p", &format!("is {top_p}, it must be above 0 and at most 1")));
    }
    if !(0.0..1.0).contains(&min_p) {
        return Err(invalid("sampling.min_p", &format!("is {min_p}, it must be from 0 to below 1")));
    }
    Ok(SamplingParams { temperature, top_p, top_k, min_p, seed })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RequestLimits = RequestLimits { context: 100, pool_tokens: 64, vocab: 50 };

    fn wire() -> WireLeg {
        WireLeg {
            key: Some(v1::HandoffKey { request: vec![1; 16].into(), group: 0, attempt: 2 }),
            prompt: vec![1, 2, 49],
            sampling: Some(v1::Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 7 }),
            stopping: Some(v1::Stopping { max_new_tokens: 5, stop_token_ids: vec![3] }),
            num_generated: 1,
            terms: None,
        }
    }

    fn terms(wire: &mut WireLeg) -> &mut v1::Terms {
        wire.terms.get_or_insert_default()
    }

    #[test]
    fn a_good_request_passes() {
        let leg = LegRequest::check(wire(), &LIMITS).unwrap();
        assert_eq!((leg.key.attempt, leg.max_new_tokens, leg.sampling.seed), (2, 5, 7));
        // Without terms: one sequence of a new request.
        assert_eq!((leg.num_sequences, leg.first_sequence, leg.age), (1, 0, Duration::ZERO));
        assert_eq!((leg.priority, leg.cache, leg.preempted, leg.timeout), (0, true, false, None));
    }

    #[test]
    fn terms_reach_the_step_loop() {
        let mut wire = wire();
        wire.num_generated = 0;
        *terms(&mut wire) = v1::Terms {
            num_sequences: 13,
            first_sequence: 3,
            age_ms: 1500,
            priority: -100,
            no_prefix_cache: true,
            preempted: true,
            timeout_ms: 250,
        };
        let leg = LegRequest::check(wire, &LIMITS).unwrap();
        assert_eq!(leg.timeout, Some(Duration::from_millis(250)));
        let new = leg.submission(Origin::Local, None);
        assert_eq!((new.num_sequences, new.first_sequence, new.age.as_millis()), (13, 3, 1500));
        assert_eq!((new.priority, new.cache, new.preempted), (-100, false, true));
    }

    #[test]
    fn every_bad_field_is_named_with_its_limit() {
        type Edit = fn(&mut WireLeg);
        let cases: [(Edit, &[&str]); 23] = [
            (|w| w.key = None, &["key"]),
            (
                |w| w.key = Some(v1::HandoffKey { request: vec![1; 15].into(), ..Default::default() }),
                &["key.request", "15", "16"],
            ),
            (|w| w.prompt.clear(), &["prompt", "empty"]),
            (|w| w.prompt = vec![1; 100], &["prompt", "100"]),
            (|w| w.prompt = vec![1; 65], &["prompt", "65", "64"]),
            (|w| w.prompt[1] = 50, &["prompt[1]", "50"]),
            (|w| w.num_generated = 3, &["num_generated", "3"]),
            (|w| w.sampling = None, &["sampling"]),
            (|w| w.stopping = None, &["stopping"]),
            (|w| w.stopping = Some(v1::Stopping::default()), &["max_new_tokens", "1"]),
            (
                |w| w.stopping.as_mut().unwrap().stop_token_ids = vec![0; 129],
                &["stop_token_ids", "129", "128"],
            ),
            (|w| w.sampling.as_mut().unwrap().temperature = f32::NAN, &["temperature"]),
            (|w| w.sampling.as_mut().unwrap().temperature = -0.1, &["temperature", "-0.1"]),
            (|w| w.sampling.as_mut().unwrap().top_p = 0.0, &["top_p"]),
            (|w| w.sampling.as_mut().unwrap().min_p = 1.0, &["min_p"]),
            (|w| terms(w).num_sequences = 17, &["terms.num_sequences", "17", "16"]),
            (|w| terms(w).num_sequences = 2, &["terms.num_sequences", "num_generated", "limit is 1"]),
            (|w| terms(w).first_sequence = 16, &["terms.first_sequence", "16", "15"]),
            (
                |w| {
                    w.num_generated = 0;
                    (terms(w).first_sequence, terms(w).num_sequences) = (15, 2);
                },
                &["terms.first_sequence", "15", "14"],
            ),
            (|w| terms(w).priority = 101, &["terms.priority", "101", "100"]),
            (|w| terms(w).priority = -101, &["terms.priority", "-101", "-100"]),
            (|w| terms(w).age_ms = u64::MAX, &["terms.age_ms", "604800000"]),
            (|w| terms(w).timeout_ms = 86_400_001, &["terms.timeout_ms", "86400001", "86400000"]),
        ];
        for (edit, words) in cases {
            let mut wire = wire();
            edit(&mut wire);
            let error = LegRequest::check(wire, &LIMITS).unwrap_err();
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
            for word in words {
                assert!(error.message().contains(word), "{word}: {}", error.message());
            }
        }
    }
}
