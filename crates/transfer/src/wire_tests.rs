use baton_kv::KvDtype;
use proptest::prelude::*;

use super::*;

fn key() -> impl Strategy<Value = HandoffKey> {
    (any::<[u8; 16]>(), any::<u32>(), any::<u32>()).prop_map(|(request, group, attempt)| HandoffKey {
        request: RequestId(request),
        group,
        attempt,
    })
}

fn cause() -> impl Strategy<Value = Cause> {
    proptest::sample::select(Cause::ALL.to_vec())
}

fn finish() -> impl Strategy<Value = Option<FinishReason>> {
    proptest::sample::select(vec![None, Some(FinishReason::Stop), Some(FinishReason::Length)])
}

fn first_tokens() -> impl Strategy<Value = Vec<FirstToken>> {
    let token = (any::<u32>(), -100.0f32..0.0, any::<u32>()).prop_map(|(id, logprob, index)| SampledToken {
        id,
        logprob,
        index,
    });
    let tokens = proptest::collection::vec((token, finish()), 1..=MAX_SEQUENCES);
    (0..1000u32, tokens).prop_map(|(first, tokens)| {
        let number = |(nth, (token, finish))| FirstToken { sequence: first + nth as u32, token, finish };
        tokens.into_iter().enumerate().map(number).collect()
    })
}

fn source_message() -> impl Strategy<Value = SourceMessage> {
    prop_oneof![
        (key(), any::<[u8; 16]>(), any::<[u8; 16]>(), any::<u32>()).prop_map(
            |(key, source, destination, prompt_tokens)| {
                SourceMessage::Offer {
                    key,
                    source: InstanceId(source),
                    destination: InstanceId(destination),
                    prompt_tokens,
                }
            }
        ),
        Just(SourceMessage::Notice),
        (first_tokens(), any::<u64>(), any::<u64>()).prop_map(|(first_tokens, bytes, frames)| {
            SourceMessage::Commit(Commit { first_tokens, bytes, frames })
        }),
        cause().prop_map(SourceMessage::Abort),
    ]
}

fn destination_message() -> impl Strategy<Value = DestinationMessage> {
    prop_oneof![
        (any::<u32>(), any::<u64>())
            .prop_map(|(skip_tokens, credit)| DestinationMessage::Grant { skip_tokens, credit }),
        any::<u64>().prop_map(|retry_after_ms| DestinationMessage::Busy { retry_after_ms }),
        cause().prop_map(DestinationMessage::Gone),
        any::<u64>().prop_map(DestinationMessage::Credit),
        any::<u64>().prop_map(DestinationMessage::Resend),
        Just(DestinationMessage::Committed),
        any::<bool>().prop_map(|committed| DestinationMessage::Aborted { committed }),
    ]
}

fn layout() -> impl Strategy<Value = KvLayout> {
    (any::<[u8; 32]>(), 1usize..200, 1usize..200, 1usize..200, 1usize..200, any::<bool>(), ".{0,8}").prop_map(
        |(model_digest, num_layers, num_kv_heads, head_dim, block_size, half, text)| KvLayout {
            model_digest,
            num_layers,
            num_kv_heads,
            head_dim,
            block_size,
            dtype: if half { KvDtype::F16 } else { KvDtype::F32 },
            arrangement: text.clone(),
            numerics_id: text,
        },
    )
}

/// Through bytes, as on a connection.
fn over_the_wire<M: prost::Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

proptest! {
    #[test]
    fn source_messages_survive(message in source_message()) {
        prop_assert_eq!(decode_source(over_the_wire(&encode_source(&message))), Ok(message));
    }

    #[test]
    fn destination_messages_survive(message in destination_message()) {
        prop_assert_eq!(decode_destination(over_the_wire(&encode_destination(&message))), Ok(message));
    }

    #[test]
    fn layouts_survive(layout in layout()) {
        prop_assert_eq!(decode_layout(Some(over_the_wire(&encode_layout(&layout)))), Ok(layout));
    }

    #[test]
    fn keys_survive(key in key()) {
        prop_assert_eq!(decode_key(Some(over_the_wire(&encode_key(&key)))), Ok(key));
    }
}

#[test]
fn every_cause_has_its_own_number_and_no_other_number_is_one() {
    for cause in Cause::ALL {
        assert_eq!(decode_cause(encode_cause(cause) as i32), Ok(cause));
        assert_eq!(encode_cause(cause).as_str_name(), format!("CAUSE_{}", cause.name().to_uppercase()));
    }
    for number in [0, -1, 18, i32::MAX] {
        assert!(decode_cause(number).is_err(), "{number}");
    }
    assert!(decode_finish(7).is_err());
}

#[test]
fn what_is_malformed_is_named() {
    let says = |result: Result<()>, text: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(error.cause(), Cause::Protocol);
    };
    says(decode_key(None).map(drop), "key: is absent");
    let short = v1::HandoffKey { request: Bytes::from_static(b"short"), group: 0, attempt: 0 };
    says(decode_key(Some(short)).map(drop), "key.request: 16 bytes are needed, got 5");
    says(decode_source(v1::SourceMessage { message: None }).map(drop), "message: is empty or unknown");
    says(decode_destination(v1::DestinationMessage { message: None }).map(drop), "message: is empty");
    let commit = |num: u32| {
        let token = Some(v1::SampledToken::default());
        let first = |sequence| v1::FirstToken { sequence, token, finish: 0 };
        let first_tokens = (0..num).map(first).collect();
        let message = v1::source_message::Message::Commit(v1::Commit { first_tokens, ..Default::default() });
        decode_source(v1::SourceMessage { message: Some(message) }).map(drop)
    };
    commit(16).unwrap();
    says(commit(0), "commit.first_tokens: has 0 entries, 1 to 16 are needed");
    says(commit(17), "commit.first_tokens: has 17 entries");
    let bare = vec![v1::FirstToken::default()];
    says(decode_first_tokens("commit.first_tokens", bare).map(drop), "commit.first_tokens: is absent");
    let offer = v1::source_message::Message::Offer(v1::Offer {
        key: Some(v1::HandoffKey { request: Bytes::from_static(&[0; 16]), group: 0, attempt: 0 }),
        ..v1::Offer::default()
    });
    says(decode_source(v1::SourceMessage { message: Some(offer) }).map(drop), "offer.source_instance");
    let good = KvLayout {
        model_digest: [1; 32],
        num_layers: 1,
        num_kv_heads: 1,
        head_dim: 1,
        block_size: 1,
        dtype: KvDtype::F16,
        arrangement: String::new(),
        numerics_id: String::new(),
    };
    let good = encode_layout(&good);
    says(
        decode_layout(Some(v1::KvLayout { block_size: 0, ..good.clone() })).map(drop),
        "layout.block_size: is 0",
    );
    says(decode_layout(Some(v1::KvLayout { dtype: "f8".into(), ..good.clone() })).map(drop), "layout.dtype");
    says(
        decode_layout(Some(v1::KvLayout { model_digest: Bytes::new(), ..good })).map(drop),
        "layout.model_digest",
    );
    says(decode_layout(None).map(drop), "layout: is absent");
}
