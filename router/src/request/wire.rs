//! What workers say on the wire, as facts.

use baton_dispatch::{DecodeFact, PrefillFact};
use baton_handoff::{Cause, FinishReason, FirstToken, SampledToken};
use baton_proto::v1;
use baton_telemetry::StallCause;
use tonic::{Code, Status};

use super::cost::{AvoidedStall, Kv, RunStats, Stall};
use super::legs::{DecodeEvent, PrefillEvent, Started};

/// What a status in place of an event means.
pub(super) enum Broken {
    /// The worker's own word.
    Said(Cause),
    /// It never had the request.
    Unreachable,
    /// The stream broke.
    Lost,
}

impl Broken {
    /// `opened`: whether the stream had been opened.
    pub(super) fn new(status: &Status, opened: bool, address: &str) -> Self {
        let (code, detail) = (status.code(), status.message());
        tracing::warn!(worker = address, %code, detail, "a worker refused or dropped a leg");
        match code {
            Code::AlreadyExists => Self::Said(Cause::Duplicate),
            Code::ResourceExhausted => Self::Said(Cause::Busy),
            Code::FailedPrecondition => Self::Said(Cause::Layout),
            Code::DeadlineExceeded => Self::Said(Cause::Deadline),
            Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => Self::Said(Cause::Protocol),
            Code::NotFound => Self::Said(Cause::NotFound),
            Code::Unavailable if !opened => Self::Unreachable,
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::PermissionDenied
            | Code::Aborted
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
            | Code::Unauthenticated => Self::Lost,
        }
    }
}

pub(super) fn prefill_event(event: v1::PrefillEvent, address: &str) -> PrefillEvent {
    use v1::prefill_event::Event;
    match event.event {
        None => PrefillEvent::Fact(PrefillFact::Failed(Cause::Protocol)),
        Some(Event::FirstTokens(first)) => {
            let tokens: Option<Vec<_>> = first.tokens.iter().map(first_token).collect();
            match tokens {
                Some(tokens) if !tokens.is_empty() => PrefillEvent::FirstTokens {
                    tokens,
                    cached_tokens: first.times.map_or(0, |times| times.cached_tokens),
                },
                _ => PrefillEvent::Fact(PrefillFact::Failed(Cause::Protocol)),
            }
        }
        Some(Event::HandoffDone(_)) => PrefillEvent::Fact(PrefillFact::Done),
        Some(Event::Failed(reason)) => PrefillEvent::Fact(PrefillFact::Failed(failed(&reason, address))),
        Some(Event::HandoffFailed(reason)) => {
            let (attempt, cause, detail) = (reason.attempt, cause(reason.cause()), reason.detail);
            tracing::warn!(
                worker = address,
                cause = cause.name(),
                detail,
                "a handoff failed, its KV is held"
            );
            PrefillEvent::HandoffFailed { attempt, cause }
        }
    }
}

pub(super) fn decode_event(event: v1::DecodeEvent, address: &str) -> DecodeEvent {
    use v1::decode_event::Event;
    match event.event {
        None => DecodeEvent::Fact(DecodeFact::Failed(Cause::Protocol)),
        Some(Event::Started(told)) => DecodeEvent::Started(started(&told)),
        Some(Event::Tokens(tokens)) => DecodeEvent::Tokens {
            sequence: tokens.sequence,
            tokens: tokens.tokens.iter().map(token).collect(),
        },
        Some(Event::Stall(told)) => DecodeEvent::Stalled(stall(&told)),
        Some(Event::Finished(finished)) => match finish(finished.reason()) {
            Some(reason) => DecodeEvent::Finished {
                sequence: finished.sequence,
                reason,
                stats: finished.stats.map(stats),
            },
            None => DecodeEvent::Fact(DecodeFact::Failed(Cause::Protocol)),
        },
        Some(Event::Preempted(preempted)) => {
            DecodeEvent::Fact(DecodeFact::Preempted { sequence: preempted.sequence })
        }
        Some(Event::Failed(reason)) => DecodeEvent::Fact(DecodeFact::Failed(failed(&reason, address))),
    }
}

fn started(started: &v1::Started) -> Started {
    let kv = started.kv.as_ref().filter(|kv| kv.bytes > 0).map(|kv| Kv {
        bytes: kv.bytes,
        total_ms: ms(kv.total_us),
        exposed_ms: ms(kv.exposed_us),
        wire_ms: ms(kv.wire_us),
    });
    let avoided = started.avoided.map(|avoided| AvoidedStall {
        victims: avoided.victims,
        total_ms: avoided.total_us as f64 / 1e3,
        residual: avoided.residual,
    });
    Started { kv, cached_tokens: started.cached_tokens, avoided }
}

fn stall(stall: &v1::Stall) -> Stall {
    let cause = match stall.cause() {
        v1::StallCause::LocalPrefill => StallCause::LocalPrefill,
        v1::StallCause::Preemption => StallCause::Preemption,
        v1::StallCause::Resume => StallCause::Resume,
        v1::StallCause::Copy => StallCause::Copy,
        v1::StallCause::SlowStep | v1::StallCause::Unspecified => StallCause::SlowStep,
    };
    Stall { cause, blocked_ms: ms(stall.blocked_us) }
}

fn stats(stats: v1::RunStats) -> RunStats {
    RunStats { avoided_ms: stats.avoided_us as f64 / 1e3, avoided_prefills: stats.avoided_prefills }
}

fn ms(us: u64) -> f64 {
    us as f64 / 1e3
}

fn failed(failed: &v1::Failed, address: &str) -> Cause {
    let cause = cause(failed.cause());
    let detail = &failed.detail;
    if cause == Cause::Preempted {
        tracing::debug!(worker = address, detail, "a worker preempted a leg");
    } else {
        tracing::warn!(worker = address, cause = cause.name(), detail, "a worker ended a leg");
    }
    cause
}

fn first_token(first: &v1::FirstToken) -> Option<FirstToken> {
    let token = first.token.as_ref().map(token)?;
    Some(FirstToken { sequence: first.sequence, token, finish: finish(first.finish()) })
}

fn token(token: &v1::SampledToken) -> SampledToken {
    SampledToken { id: token.id, logprob: token.logprob, index: token.index }
}

fn finish(reason: v1::FinishReason) -> Option<FinishReason> {
    match reason {
        v1::FinishReason::Unspecified => None,
        v1::FinishReason::Stop => Some(FinishReason::Stop),
        v1::FinishReason::Length => Some(FinishReason::Length),
    }
}

fn cause(wire: v1::Cause) -> Cause {
    match wire {
        v1::Cause::Unspecified | v1::Cause::Protocol => Cause::Protocol,
        v1::Cause::Cancelled => Cause::Cancelled,
        v1::Cause::Deadline => Cause::Deadline,
        v1::Cause::Duplicate => Cause::Duplicate,
        v1::Cause::WrongInstance => Cause::WrongInstance,
        v1::Cause::Busy => Cause::Busy,
        v1::Cause::TooLarge => Cause::TooLarge,
        v1::Cause::Layout => Cause::Layout,
        v1::Cause::Corrupt => Cause::Corrupt,
        v1::Cause::PeerLost => Cause::PeerLost,
        v1::Cause::NotFound => Cause::NotFound,
        v1::Cause::Draining => Cause::Draining,
        v1::Cause::Expired => Cause::Expired,
        v1::Cause::Engine => Cause::Engine,
        v1::Cause::NotNeeded => Cause::NotNeeded,
        v1::Cause::SlowReader => Cause::SlowReader,
        v1::Cause::Preempted => Cause::Preempted,
    }
}
