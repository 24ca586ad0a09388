//! Between wire messages and the values of `kv` and `handoff`. What comes in is checked; what goes out can't fail.

use baton_handoff::{
    Cause, Commit, DestinationMessage, FinishReason, FirstToken, HandoffKey, InstanceId, MAX_SEQUENCES,
    RequestId, SampledToken, SourceMessage,
};
use baton_kv::KvLayout;
use baton_proto::v1;
use bytes::Bytes;

use crate::TransferError;

type Result<T> = std::result::Result<T, TransferError>;

/// 16 bytes that name a process.
pub fn encode_instance(id: InstanceId) -> Bytes {
    Bytes::copy_from_slice(&id.0)
}

/// # Errors
/// [`TransferError::Protocol`] unless there are exactly 16 bytes.
pub fn decode_instance(field: &str, bytes: &[u8]) -> Result<InstanceId> {
    InstanceId::from_slice(bytes).ok_or_else(|| {
        TransferError::malformed(field, format_args!("16 bytes are needed, got {}", bytes.len()))
    })
}

/// A key, for the wire.
pub fn encode_key(key: &HandoffKey) -> v1::HandoffKey {
    v1::HandoffKey { request: Bytes::copy_from_slice(&key.request.0), group: key.group, attempt: key.attempt }
}

/// # Errors
/// [`TransferError::Protocol`] when it is absent or its request id has not 16 bytes.
pub fn decode_key(key: Option<v1::HandoffKey>) -> Result<HandoffKey> {
    let key = key.ok_or_else(|| TransferError::malformed("key", "is absent"))?;
    let request = RequestId::from_slice(&key.request).ok_or_else(|| {
        TransferError::malformed(
            "key.request",
            format_args!("16 bytes are needed, got {}", key.request.len()),
        )
    })?;
    Ok(HandoffKey { request, group: key.group, attempt: key.attempt })
}

/// A cause, for the wire.
pub const fn encode_cause(cause: Cause) -> v1::Cause {
    match cause {
        Cause::Cancelled => v1::Cause::Cancelled,
        Cause::Deadline => v1::Cause::Deadline,
        Cause::Duplicate => v1::Cause::Duplicate,
        Cause::WrongInstance => v1::Cause::WrongInstance,
        Cause::Busy => v1::Cause::Busy,
        Cause::TooLarge => v1::Cause::TooLarge,
        Cause::Layout => v1::Cause::Layout,
        Cause::Corrupt => v1::Cause::Corrupt,
        Cause::PeerLost => v1::Cause::PeerLost,
        Cause::NotFound => v1::Cause::NotFound,
        Cause::Draining => v1::Cause::Draining,
        Cause::Expired => v1::Cause::Expired,
        Cause::Protocol => v1::Cause::Protocol,
        Cause::Engine => v1::Cause::Engine,
        Cause::NotNeeded => v1::Cause::NotNeeded,
        Cause::SlowReader => v1::Cause::SlowReader,
        Cause::Preempted => v1::Cause::Preempted,
    }
}

/// # Errors
/// [`TransferError::Protocol`] for a number that is no cause.
pub fn decode_cause(cause: i32) -> Result<Cause> {
    Cause::ALL
        .into_iter()
        .find(|&known| encode_cause(known) as i32 == cause)
        .ok_or_else(|| TransferError::malformed("cause", format_args!("{cause} is none")))
}

/// A failed leg, for the wire; the cause's own words stand in for an empty `detail`.
pub fn encode_failed(cause: Cause, detail: &str) -> v1::Failed {
    let detail = if detail.is_empty() { cause.to_string() } else { detail.to_owned() };
    v1::Failed { cause: encode_cause(cause) as i32, detail }
}

/// A reason to finish, or none, for the wire.
pub const fn encode_finish(finish: Option<FinishReason>) -> v1::FinishReason {
    match finish {
        None => v1::FinishReason::Unspecified,
        Some(FinishReason::Stop) => v1::FinishReason::Stop,
        Some(FinishReason::Length) => v1::FinishReason::Length,
    }
}

/// # Errors
/// [`TransferError::Protocol`] for a number that is no reason.
pub fn decode_finish(finish: i32) -> Result<Option<FinishReason>> {
    match v1::FinishReason::try_from(finish) {
        Ok(v1::FinishReason::Unspecified) => Ok(None),
        Ok(v1::FinishReason::Stop) => Ok(Some(FinishReason::Stop)),
        Ok(v1::FinishReason::Length) => Ok(Some(FinishReason::Length)),
        Err(_) => Err(TransferError::malformed("finish", format_args!("{finish} is none"))),
    }
}

/// A token, for the wire.
pub const fn encode_token(token: SampledToken) -> v1::SampledToken {
    v1::SampledToken { id: token.id, logprob: token.logprob, index: token.index }
}

/// # Errors
/// [`TransferError::Protocol`] when it is absent.
pub fn decode_token(field: &str, token: Option<v1::SampledToken>) -> Result<SampledToken> {
    let token = token.ok_or_else(|| TransferError::malformed(field, "is absent"))?;
    Ok(SampledToken { id: token.id, logprob: token.logprob, index: token.index })
}

/// The first tokens of a group, for the wire.
pub fn encode_first_tokens(first: &[FirstToken]) -> Vec<v1::FirstToken> {
    let encode = |first: &FirstToken| v1::FirstToken {
        sequence: first.sequence,
        token: Some(encode_token(first.token)),
        finish: encode_finish(first.finish).into(),
    };
    first.iter().map(encode).collect()
}

/// # Errors
/// [`TransferError::Protocol`] unless there are 1 to [`MAX_SEQUENCES`], each complete. Their numbers are the machines' to check.
pub fn decode_first_tokens(field: &str, first: Vec<v1::FirstToken>) -> Result<Vec<FirstToken>> {
    let num = first.len();
    if !(1..=MAX_SEQUENCES).contains(&num) {
        let what = format!("has {num} entries, 1 to {MAX_SEQUENCES} are needed");
        return Err(TransferError::malformed(field, what));
    }
    let decode = |first: v1::FirstToken| {
        let token = decode_token(field, first.token)?;
        Ok(FirstToken { sequence: first.sequence, token, finish: decode_finish(first.finish)? })
    };
    first.into_iter().map(decode).collect()
}

/// A layout, for the wire.
pub fn encode_layout(layout: &KvLayout) -> v1::KvLayout {
    v1::KvLayout {
        model_digest: Bytes::copy_from_slice(&layout.model_digest),
        num_layers: layout.num_layers as u32,
        num_kv_heads: layout.num_kv_heads as u32,
        head_dim: layout.head_dim as u32,
        block_size: layout.block_size as u32,
        dtype: layout.dtype.name().to_owned(),
        arrangement: layout.arrangement.clone(),
        numerics_id: layout.numerics_id.clone(),
    }
}

/// # Errors
/// [`TransferError::Protocol`] for an absent layout, a digest that has not 32 bytes, a count of 0 or an unknown dtype.
pub fn decode_layout(layout: Option<v1::KvLayout>) -> Result<KvLayout> {
    let layout = layout.ok_or_else(|| TransferError::malformed("layout", "is absent"))?;
    let model_digest = layout.model_digest.as_ref().try_into().map_err(|_| {
        let got = layout.model_digest.len();
        TransferError::malformed("layout.model_digest", format_args!("32 bytes are needed, got {got}"))
    })?;
    let count = |field: &str, value: u32| match value {
        0 => Err(TransferError::malformed(field, "is 0")),
        _ => Ok(value as usize),
    };
    Ok(KvLayout {
        model_digest,
        num_layers: count("layout.num_layers", layout.num_layers)?,
        num_kv_heads: count("layout.num_kv_heads", layout.num_kv_heads)?,
        head_dim: count("layout.head_dim", layout.head_dim)?,
        block_size: count("layout.block_size", layout.block_size)?,
        dtype: layout.dtype.parse().map_err(|e: String| TransferError::malformed("layout.dtype", e))?,
        arrangement: layout.arrangement,
        numerics_id: layout.numerics_id,
    })
}

/// What a source says, for the wire.
pub fn encode_source(message: &SourceMessage) -> v1::SourceMessage {
    use v1::source_message::Message;
    let message = match message {
        SourceMessage::Offer { key, source, destination, prompt_tokens } => Message::Offer(v1::Offer {
            key: Some(encode_key(key)),
            source_instance: encode_instance(*source),
            destination_instance: encode_instance(*destination),
            prompt_tokens: *prompt_tokens,
        }),
        SourceMessage::Notice => Message::Notice(v1::Notice::default()),
        SourceMessage::Commit(Commit { first_tokens, bytes, frames }) => Message::Commit(v1::Commit {
            first_tokens: encode_first_tokens(first_tokens),
            bytes: *bytes,
            frames: *frames,
            step_cost: None,
        }),
        SourceMessage::Abort(cause) => {
            Message::Abort(v1::Abort { cause: encode_cause(*cause) as i32, detail: cause.to_string() })
        }
    };
    v1::SourceMessage { message: Some(message) }
}

/// # Errors
/// [`TransferError::Protocol`] that names the field.
pub fn decode_source(message: v1::SourceMessage) -> Result<SourceMessage> {
    use v1::source_message::Message;
    let message =
        message.message.ok_or_else(|| TransferError::malformed("message", "is empty or unknown"))?;
    Ok(match message {
        Message::Offer(offer) => SourceMessage::Offer {
            key: decode_key(offer.key)?,
            source: decode_instance("offer.source_instance", &offer.source_instance)?,
            destination: decode_instance("offer.destination_instance", &offer.destination_instance)?,
            prompt_tokens: offer.prompt_tokens,
        },
        Message::Notice(v1::Notice { .. }) => SourceMessage::Notice,
        Message::Commit(commit) => SourceMessage::Commit(Commit {
            first_tokens: decode_first_tokens("commit.first_tokens", commit.first_tokens)?,
            bytes: commit.bytes,
            frames: commit.frames,
        }),
        Message::Abort(abort) => SourceMessage::Abort(decode_cause(abort.cause)?),
    })
}

/// What a destination says, for the wire.
pub fn encode_destination(message: &DestinationMessage) -> v1::DestinationMessage {
    use v1::destination_message::Message;
    let message = match *message {
        DestinationMessage::Grant { skip_tokens, credit } => {
            Message::Grant(v1::Grant { skip_tokens, credit })
        }
        DestinationMessage::Busy { retry_after_ms } => Message::Busy(v1::Busy { retry_after_ms }),
        DestinationMessage::Gone(cause) => {
            Message::Gone(v1::Gone { cause: encode_cause(cause) as i32, detail: cause.to_string() })
        }
        DestinationMessage::Credit(offset) => Message::Credit(v1::Credit { offset }),
        DestinationMessage::Resend(frame) => Message::Resend(v1::Resend { frame }),
        DestinationMessage::Committed => Message::Committed(v1::Committed {}),
        DestinationMessage::Aborted { committed } => Message::Aborted(v1::Aborted { committed }),
    };
    v1::DestinationMessage { message: Some(message) }
}

/// # Errors
/// [`TransferError::Protocol`] that names the field.
pub fn decode_destination(message: v1::DestinationMessage) -> Result<DestinationMessage> {
    use v1::destination_message::Message;
    let message =
        message.message.ok_or_else(|| TransferError::malformed("message", "is empty or unknown"))?;
    Ok(match message {
        Message::Grant(v1::Grant { skip_tokens, credit }) => {
            DestinationMessage::Grant { skip_tokens, credit }
        }
        Message::Busy(v1::Busy { retry_after_ms }) => DestinationMessage::Busy { retry_after_ms },
        Message::Gone(gone) => DestinationMessage::Gone(decode_cause(gone.cause)?),
        Message::Credit(v1::Credit { offset }) => DestinationMessage::Credit(offset),
        Message::Resend(v1::Resend { frame }) => DestinationMessage::Resend(frame),
        Message::Committed(v1::Committed {}) => DestinationMessage::Committed,
        Message::Aborted(v1::Aborted { committed }) => DestinationMessage::Aborted { committed },
    })
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
