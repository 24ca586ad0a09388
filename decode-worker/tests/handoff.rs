//! A prompt computed on one worker is decoded on another.

mod pair;

use baton_proto::v1;
use pair::{Call, Pair, cause, decode_to_end, prefill_to_end, start_decode, within};
use tonic::Code;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn tokens_are_those_of_a_local_run_whatever_the_prompts_length() {
    let mut pair = Pair::start(&[], &[]).await;
    let layout = pair.decode.core().loaded().unwrap().layout().clone();
    let mut calls = Vec::new();
    let mut num_bytes = 0;
    for (n, length) in [1, 15, 16, 17, 63, 64, 65, 700, 2049].into_iter().enumerate() {
        let mut call = Call::new(n as u64, length, 12);
        call.temperature = if n % 2 == 0 { 0.0 } else { 0.8 };
        let (tokens, kv) = pair.run(&call).await;
        assert_eq!(tokens.len(), 12);
        assert_eq!(kv.bytes, (length * layout.token_bytes()) as u64, "prompt of {length}");
        assert!(kv.frames > 0 && kv.exposed_us <= kv.total_us, "{kv:?}");
        num_bytes += kv.bytes;
        calls.push((call, tokens));
    }
    let metrics = &pair.decode.core().metrics;
    assert_eq!(metrics.prompt_tokens_computed.get(), 0, "the decode worker computed no prompt");
    assert_eq!(metrics.kv_received_bytes.get(), num_bytes);
    assert_eq!(pair.prefill.core().metrics.kv_sent_bytes.get(), num_bytes);
    assert_eq!(metrics.num_handoffs("committed"), 9);
    for (call, tokens) in calls {
        assert_eq!(pair.run_locally(&call).await, tokens, "prompt of {}", call.prompt.len());
    }
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn many_at_once_give_the_tokens_of_each_alone() {
    let mut pair = Pair::start(&[], &[]).await;
    let calls: Vec<Call> = (0..12).map(|n| Call::new(n, 20 + 37 * n as usize, 24)).collect();
    let mut legs = Vec::new();
    for call in &calls {
        let decode = pair.decode(call).await.unwrap();
        let prefill = pair.prefill(call).await.unwrap();
        legs.push(tokio::spawn(async move { tokio::join!(prefill_to_end(prefill), decode_to_end(decode)) }));
    }
    for (leg, call) in legs.into_iter().zip(&calls) {
        let (first, rest) = leg.await.unwrap();
        let mut tokens = vec![first.first.unwrap()];
        tokens.extend(rest.tokens.unwrap_or_else(|| panic!("{:?}", rest.failed)));
        assert_eq!(tokens, pair.run_locally(call).await, "prompt of {}", call.prompt.len());
    }
    pair.settles().await;
}

/// Whoever has the last token of a short answer lets go of the prefill leg, often before that has heard of the commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_committed_handoff_counts_as_committed_though_its_caller_is_gone() {
    const NUM_CALLS: u64 = 300;
    let mut pair = Pair::start(&[], &[]).await;
    for n in 0..NUM_CALLS {
        let call = Call::new(n, 20, 2);
        let decode = pair.decode(&call).await.unwrap();
        let prefill = pair.prefill(&call).await.unwrap();
        assert!(decode_to_end(decode).await.tokens.is_some());
        drop(prefill);
    }
    pair.settles().await;
    let metrics = [&pair.prefill.core().metrics, &pair.decode.core().metrics];
    let ended = |cause| metrics.map(|metrics| metrics.num_handoffs(cause));
    for _ in 0..300 {
        if ended("committed").iter().sum::<u64>() + ended("cancelled").iter().sum::<u64>() == 2 * NUM_CALLS {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!((ended("committed"), ended("cancelled")), ([NUM_CALLS; 2], [0; 2]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn one_token_needs_no_decode_worker() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call::new(1, 40, 1);
    let stream = pair.to_prefill.prefill(call.prefill(None)).await.unwrap().into_inner();
    let outcome = prefill_to_end(stream).await;
    assert_eq!(outcome.finish, v1::FinishReason::Length as i32);
    assert!(outcome.first.is_some() && outcome.end.is_none(), "{outcome:?}");
    let error = pair.to_prefill.prefill(Call::new(2, 40, 2).prefill(None)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("destination"), "{}", error.message());
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_first_token_that_stops_leaves_nothing_to_decode() {
    let mut pair = Pair::start(&[], &[]).await;
    let mut call = Call::new(1, 40, 8);
    let first = pair.run_locally(&call).await[0];
    call.stop = vec![first];
    let decode = pair.decode(&call).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    let (prefill, decode) = tokio::join!(prefill_to_end(prefill), decode_to_end(decode));
    assert_eq!((prefill.first, prefill.finish), (Some(first), v1::FinishReason::Stop as i32));
    assert!(prefill.end.is_none(), "{prefill:?}");
    assert_eq!(decode.failed.unwrap().cause(), v1::Cause::NotNeeded);
    assert!(decode.tokens.is_none() && decode.kv.is_none());
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_offer_waits_a_while_for_its_leg_and_then_no_more() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call::new(1, 40, 8);
    let prefill = pair.prefill(&call).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    let decode = pair.decode(&call).await.unwrap();
    let (first, rest) = tokio::join!(prefill_to_end(prefill), decode_to_end(decode));
    assert_eq!(1 + rest.tokens.unwrap().len(), 8);
    assert!(first.first.is_some());
    // Nobody opens a Decode leg for this one.
    let prefill = pair.prefill(&Call::new(2, 40, 8)).await.unwrap();
    let outcome = prefill_to_end(prefill).await;
    assert_eq!(cause(&outcome.end), v1::Cause::NotFound);
    assert!(outcome.first.is_none(), "nothing is computed without a grant");
    assert_eq!(pair.prefill.core().metrics.prompt_tokens_computed.get(), 40);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_key_is_served_once() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call::new(1, 40, 4000);
    let decode = pair.decode(&call).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    assert_eq!(pair.decode(&call).await.unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(pair.prefill(&call).await.unwrap_err().code(), Code::AlreadyExists);
    drop((decode, prefill));
    pair.settles().await;
    // Its end is remembered.
    assert_eq!(pair.decode(&call).await.unwrap_err().code(), Code::AlreadyExists);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_overlong_prompt_is_refused_with_both_numbers() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call::new(1, 5000, 4);
    for error in [pair.prefill(&call).await.unwrap_err(), pair.decode(&call).await.unwrap_err()] {
        assert_eq!(error.code(), Code::InvalidArgument);
        let text = error.message();
        assert!(text.contains("5000") && text.contains("4096"), "{text}");
    }
    let mut call = Call::new(2, 10, 4);
    call.prompt[3] = 288;
    let error = pair.prefill(&call).await.unwrap_err();
    assert!(error.message().contains("prompt[3]") && error.message().contains("288"), "{}", error.message());
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn layouts_that_differ_are_named_within_a_second() {
    let mut pair = Pair::start(&[], &["--block-size=32"]).await;
    let call = Call::new(1, 40, 4);
    let _decode = pair.decode(&call).await.unwrap();
    let began = std::time::Instant::now();
    let outcome = prefill_to_end(pair.prefill(&call).await.unwrap()).await;
    assert!(began.elapsed().as_secs_f64() < 1.0);
    assert_eq!(cause(&outcome.end), v1::Cause::Layout);
    let text = format!("{:?}", outcome.end);
    assert!(text.contains("block_size") && text.contains("16") && text.contains("32"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn another_instance_at_the_address_is_noticed() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call::new(1, 40, 4);
    let mut destination = pair.destination();
    destination.instance_id = vec![7; 16].into();
    let stream = pair.to_prefill.prefill(call.prefill(Some(destination))).await.unwrap().into_inner();
    assert_eq!(cause(&within(prefill_to_end(stream)).await.end), v1::Cause::WrongInstance);
    // A restarted worker at another address is simply another worker.
    let other = start_decode(&[]).await;
    assert_ne!(other.core().instance, pair.decode.core().instance);
    let mut nobody = pair.destination();
    nobody.address = "127.0.0.1:1".to_owned();
    let stream =
        pair.to_prefill.prefill(Call::new(2, 40, 4).prefill(Some(nobody))).await.unwrap().into_inner();
    assert_eq!(cause(&within(prefill_to_end(stream)).await.end), v1::Cause::PeerLost);
    pair.settles().await;
}
