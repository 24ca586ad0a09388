//! A full pool: who gives up blocks, what is said of it, and how it goes on.

mod pair;

use baton_proto::v1;
use baton_proto::v1::destination_message::Message as Answer;
use baton_proto::v1::handoff_client::HandoffClient;
use baton_proto::v1::source_message::Message;
use pair::{Call, Pair, channel, decode_to_end, prefill_to_end, within};
use tokio_stream::wrappers::ReceiverStream;

/// 160 blocks of 16 tokens on the decode worker.
const SMALL: [&str; 2] = ["--context=2048", "--kv-memory=2560K"];

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_remote_sequence_leaves_once_and_resumes_with_the_same_tokens() {
    let mut pair = Pair::start(&[], &SMALL).await;
    // Each grows to 98 blocks.
    let mut calls = [1, 2].map(|n| Call { temperature: 0.9, ..Call::new(n, 160, 1400) });
    calls[0].terms.age_ms = 10_000;
    let mut want = Vec::new();
    for call in &calls {
        want.push(pair.run_locally(call).await);
    }
    let mut legs = Vec::new();
    for call in &calls {
        let decode = pair.decode(call).await.unwrap();
        let prefill = pair.prefill(call).await.unwrap();
        let legs_of = async move { tokio::join!(prefill_to_end(prefill), decode_to_end(decode)) };
        legs.push(tokio::spawn(legs_of));
    }
    let mut outcomes = Vec::new();
    for leg in legs {
        let (first, rest) = leg.await.unwrap();
        outcomes.push((first.first.unwrap(), rest));
    }
    let (first, older) = &outcomes[0];
    let tokens = [&[*first], older.tokens.as_deref().unwrap()].concat();
    assert_eq!(tokens, want[0], "the older one is not touched");
    let (first, younger) = &outcomes[1];
    let answer = &younger.by_sequence[&0];
    assert!(answer.preempted && younger.failed.is_none() && younger.tokens.is_none(), "{younger:?}");
    let mut tokens = [&[*first], answer.tokens.as_slice()].concat();
    assert!(tokens.len() > 1 && tokens.len() < 1400, "{} tokens", tokens.len());
    assert_eq!(tokens, want[1][..tokens.len()]);
    pair.settles().await;
    let metrics = &pair.decode.core().metrics;
    assert_eq!((metrics.preemptions.get(), metrics.preempted_gone.get()), (1, 1));

    // As a router resumes it: through a prefill worker, with what was delivered.
    let mut again = calls[1].clone();
    again.key.attempt = 1;
    again.prompt.extend(&tokens);
    again.num_generated = tokens.len() as u32;
    again.max_new_tokens = 1400 - again.num_generated;
    again.terms.preempted = true;
    again.terms.age_ms = 1000;
    tokens.extend(pair.run(&again).await.0);
    assert_eq!(tokens, want[1]);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn siblings_leave_one_by_one() {
    let mut pair = Pair::start(&[], &SMALL).await;
    let mut older = Call { temperature: 0.9, ..Call::new(1, 160, 1400) };
    older.terms.age_ms = 10_000;
    // Ten blocks together, then 44 each.
    let group = Call { temperature: 0.9, ..Call::new(2, 160, 700) }.group(0, 3);
    let want = pair.run_locally(&older).await;
    let mut legs = Vec::new();
    for call in [&older, &group] {
        let decode = pair.decode(call).await.unwrap();
        let prefill = pair.prefill(call).await.unwrap();
        let legs_of = async move { tokio::join!(prefill_to_end(prefill), decode_to_end(decode)) };
        legs.push(tokio::spawn(legs_of));
    }
    let (first, old) = legs.remove(0).await.unwrap();
    assert_eq!([&[first.first.unwrap()], old.tokens.as_deref().unwrap()].concat(), want);
    let (first, young) = legs.remove(0).await.unwrap();
    let firsts = first.all;
    assert!(young.by_sequence.values().any(|answer| answer.preempted));
    assert!(young.by_sequence.values().any(|answer| answer.finished), "one sibling's blocks are enough");
    // Each is over in exactly one way; what was told of it is a beginning of what it would have been.
    assert_eq!((firsts.len(), young.by_sequence.len()), (3, 3));
    for (sequence, answer) in &young.by_sequence {
        assert!(answer.finished != answer.preempted, "{answer:?}");
        let mut alone = group.again(100 + u64::from(*sequence)).group(*sequence, 1);
        alone.key.attempt = 9;
        let want = pair.run_locally(&alone).await;
        assert_eq!(answer.tokens, want[1..=answer.tokens.len()]);
        assert_eq!(answer.finished, answer.tokens.len() == 699);
    }
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_local_sequence_is_computed_again_where_it_is() {
    let mut pair = Pair::start(&[], &SMALL).await;
    let calls = [1, 2].map(|n| Call { temperature: 0.9, ..Call::new(n, 160, 1400) });
    let mut legs = Vec::new();
    for call in &calls {
        let stream = pair.to_decode.decode(call.decode(true)).await.unwrap().into_inner();
        legs.push(tokio::spawn(decode_to_end(stream)));
    }
    let mut tokens = Vec::new();
    for leg in legs {
        let outcome = leg.await.unwrap();
        assert!(!outcome.by_sequence[&0].preempted);
        tokens.push(outcome.tokens.unwrap());
    }
    assert!(pair.decode.core().metrics.preemptions.get() > 0);
    assert_eq!(pair.decode.core().metrics.preempted_gone.get(), 0);
    for (call, tokens) in calls.iter().zip(tokens) {
        let mut alone = call.again(100 + u64::from(call.key.request[0]));
        alone.key.attempt = 9;
        assert_eq!(tokens, pair.run_locally(&alone).await);
    }
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reservation_that_is_taken_away_ends_both_sides_as_preempted() {
    let mut pair = Pair::start(&[], &SMALL).await;
    let older = Call::new(1, 16, 1600);
    let old = pair.to_decode.decode(older.decode(true)).await.unwrap().into_inner();
    let mut load = pair.decode.core().loaded().unwrap().steps.load();
    within(load.wait_for(|load| load.counts.running == 1)).await.unwrap();
    // A source that offers and never sends: 80 of the 160 blocks are reserved for it.
    let younger = Call::new(2, 1280, 20).group(0, 2);
    let decode = pair.decode(&younger).await.unwrap();
    let offer = v1::Offer {
        key: Some(younger.key.clone()),
        source_instance: vec![1; 16].into(),
        destination_instance: pair.destination().instance_id,
        prompt_tokens: 1280,
    };
    let (sender, messages) = tokio::sync::mpsc::channel(1);
    sender.send(v1::SourceMessage { message: Some(Message::Offer(offer)) }).await.unwrap();
    let mut handoff = HandoffClient::new(channel(&pair.decode).await);
    let mut answers = handoff.control(ReceiverStream::new(messages)).await.unwrap().into_inner();
    let granted = within(answers.message()).await.unwrap().unwrap().message;
    assert!(matches!(granted, Some(Answer::Grant(_))), "{granted:?}");
    let gone = within(answers.message()).await.unwrap().unwrap().message;
    let Some(Answer::Gone(gone)) = gone else { panic!("not gone: {gone:?}") };
    assert_eq!(gone.cause(), v1::Cause::Preempted);
    let outcome = decode_to_end(decode).await;
    assert_eq!(outcome.failed.map(|failed| failed.cause()), Some(v1::Cause::Preempted));
    assert!(outcome.by_sequence.is_empty() && outcome.kv.is_none());
    assert_eq!(decode_to_end(old).await.tokens.unwrap().len(), 1600);
    drop(sender);
    pair.settles().await;
    assert_eq!(pair.decode.core().metrics.num_handoffs("preempted"), 1);
}
