//! Several sequences of one prompt: one transfer, shared blocks, an end for each.

mod pair;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_event::Event as DecodeEvent;
use pair::{Call, DecodeOutcome, Pair, decode_to_end, prefill_to_end, within};
use tonic::{Code, Streaming};

/// Room for sequences that last long enough to be stopped.
const ROOMY: [&str; 1] = ["--kv-memory=32M"];

/// Keys of single runs are above all others.
static RUNS: AtomicU64 = AtomicU64::new(1_000_000);

/// Each sequence of the group as a request of its own, computed on the decode worker alone.
async fn one_by_one(pair: &mut Pair, call: &Call) -> BTreeMap<u32, Vec<u32>> {
    let mut tokens = BTreeMap::new();
    let v1::Terms { first_sequence, num_sequences, .. } = call.terms;
    for sequence in first_sequence..first_sequence + num_sequences {
        let n = RUNS.fetch_add(1, Ordering::Relaxed);
        let alone = call.again(n).group(sequence, 1);
        tokens.insert(sequence, pair.run_locally(&alone).await);
    }
    tokens
}

/// Takes in events until `enough`.
async fn hear_until(
    stream: &mut Streaming<v1::DecodeEvent>,
    outcome: &mut DecodeOutcome,
    mut enough: impl FnMut(&DecodeEvent) -> bool,
) {
    loop {
        let event = within(stream.message()).await.unwrap().expect("not over").event.unwrap();
        let is_enough = enough(&event);
        outcome.hear(event);
        if is_enough {
            return;
        }
    }
}

/// Both legs of a group, up to a token of its sequence `wanted`.
async fn running(pair: &mut Pair, call: &Call, wanted: u32) -> (Streaming<v1::DecodeEvent>, DecodeOutcome) {
    let mut decode = pair.decode(call).await.unwrap();
    let prefill = pair.prefill(call).await.unwrap();
    assert!(prefill_to_end(prefill).await.first.is_some());
    let mut outcome = DecodeOutcome::default();
    let of = |event: &DecodeEvent| matches!(event, DecodeEvent::Tokens(t) if t.sequence == wanted);
    hear_until(&mut decode, &mut outcome, of).await;
    (decode, outcome)
}

fn num_held(pair: &Pair) -> usize {
    pair.decode.core().loaded().unwrap().pool.counts().held
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_group_over_one_transfer_equals_its_sequences_alone() {
    let mut pair = Pair::start(&[], &[]).await;
    let token_bytes = pair.decode.core().loaded().unwrap().layout().token_bytes();
    // Whole blocks, a partly filled one, less than one, several chunks.
    for (n, length) in [64, 70, 9, 700].into_iter().enumerate() {
        let call = Call { temperature: 1.0, ..Call::new(n as u64, length, 24) }.group(2, 4);
        let received = pair.decode.core().metrics.kv_received_bytes.get();
        let sent = pair.prefill.core().metrics.kv_sent_bytes.get();
        let (tokens, kv) = pair.run_group(&call).await;
        let bytes = (length * token_bytes) as u64;
        assert_eq!(kv.bytes, bytes, "prompt of {length}");
        assert_eq!(pair.decode.core().metrics.kv_received_bytes.get() - received, bytes);
        assert_eq!(pair.prefill.core().metrics.kv_sent_bytes.get() - sent, bytes);
        assert_eq!(tokens, one_by_one(&mut pair, &call).await, "prompt of {length}");
        let different: std::collections::BTreeSet<_> = tokens.values().collect();
        assert_eq!(different.len(), 4, "siblings differ at temperature 1");
    }
    assert_eq!(pair.prefill.core().metrics.prompt_tokens_computed.get(), 64 + 70 + 9 + 700);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_local_group_equals_its_sequences_alone() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call { temperature: 1.0, ..Call::new(1, 90, 20) }.group(0, 16);
    let stream = pair.to_decode.decode(call.decode(true)).await.unwrap().into_inner();
    let outcome = decode_to_end(stream).await;
    assert_eq!(pair.decode.core().metrics.prompt_tokens_computed.get(), 90);
    let tokens: BTreeMap<u32, Vec<u32>> =
        outcome.by_sequence.into_iter().map(|(sequence, answer)| (sequence, answer.tokens)).collect();
    assert_eq!(tokens, one_by_one(&mut pair, &call).await);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_prompts_blocks_are_held_once() {
    let mut pair = Pair::start(&[], &[]).await;
    // 640 tokens are 40 blocks, and each sequence adds up to 13 of its own. Unshared they were 160 from the start.
    let call = Call { temperature: 1.0, ..Call::new(1, 640, 200) }.group(0, 4);
    let pool = pair.decode.core().loaded().unwrap().pool.clone();
    let done = Arc::new(AtomicBool::new(false));
    let watched = Arc::clone(&done);
    let most = std::thread::spawn(move || {
        let mut most = 0;
        while !watched.load(Ordering::Relaxed) {
            most = pool.counts().held.max(most);
            std::thread::sleep(Duration::from_micros(500));
        }
        most
    });
    pair.run_group(&call).await;
    done.store(true, Ordering::Relaxed);
    let most = most.join().unwrap();
    assert!((40..=40 + 4 * 13).contains(&most), "{most} blocks were held");
    assert_eq!(pair.decode.core().metrics.forks.get(), 3);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn first_tokens_may_end_some_or_all() {
    let mut pair = Pair::start(&[], &[]).await;
    // A prompt whose first tokens are not all alike.
    let (mut call, firsts) = 'found: {
        for n in 0..50 {
            let call = Call { temperature: 1.0, ..Call::new(n, 50, 9) }.group(0, 4);
            let alone = one_by_one(&mut pair, &call).await;
            let firsts: Vec<u32> = alone.values().map(|tokens| tokens[0]).collect();
            if firsts[1..].iter().any(|&other| other != firsts[0]) {
                break 'found (call, firsts);
            }
        }
        panic!("no prompt has two first tokens");
    };
    // The first sequence is among those that end.
    call.stop = vec![firsts[0]];
    let want = one_by_one(&mut pair, &call).await;
    let (tokens, _) = pair.run_group(&call).await;
    assert_eq!(tokens, want);
    assert_eq!(tokens[&0].len(), 1);
    pair.settles().await;
    // All of them: nothing is left to decode.
    let call = Call { stop: firsts, ..call.again(60) };
    let decode = pair.decode(&call).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    let (first, rest) = tokio::join!(prefill_to_end(prefill), decode_to_end(decode));
    assert_eq!((first.all.len(), first.end.is_none()), (4, true));
    assert!(first.all.iter().all(|first| first.finish == v1::FinishReason::Stop as i32));
    assert_eq!(rest.failed.unwrap().cause(), v1::Cause::NotNeeded);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn one_token_each_needs_no_decode_worker() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call { temperature: 1.0, ..Call::new(1, 50, 1) }.group(0, 3);
    let stream = pair.to_prefill.prefill(call.prefill(None)).await.unwrap().into_inner();
    let outcome = prefill_to_end(stream).await;
    let numbers: Vec<u32> = outcome.all.iter().map(|first| first.sequence).collect();
    assert_eq!((numbers, outcome.end.is_none()), (vec![0, 1, 2], true));
    assert!(outcome.all.iter().all(|first| first.finish == v1::FinishReason::Length as i32));
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stopping_ends_one_sequence_and_the_leg_with_the_last() {
    let mut pair = Pair::start(&[], &ROOMY).await;
    for local in [false, true] {
        let mut call = Call { temperature: 1.0, ..Call::new(u64::from(local), 100, 1500) }.group(1, 4);
        let mut want = BTreeMap::new();
        for sequence in [2, 4] {
            want.extend(one_by_one(&mut pair, &call.clone().group(sequence, 1)).await);
        }
        // Two are stopped; the others end by themselves, with the tokens they would have had.
        let (mut stream, mut outcome) = match local {
            false => running(&mut pair, &call, 4).await,
            true => {
                let stream = pair.to_decode.decode(call.decode(true)).await.unwrap().into_inner();
                call.key.group = 1;
                (stream, DecodeOutcome::default())
            }
        };
        for sequence in [1, 3] {
            pair.stop(&call.key, sequence).await.unwrap();
            pair.stop(&call.key, sequence).await.unwrap();
        }
        let error = pair.stop(&call.key, 5).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("1 to 4"), "{error}");
        while let Some(event) = within(stream.message()).await.unwrap() {
            outcome.hear(event.event.unwrap());
        }
        for sequence in [2, 4] {
            let answer = &outcome.by_sequence[&sequence];
            assert!(answer.finished);
            assert_eq!(answer.tokens, want[&sequence][usize::from(!local)..]);
        }
        for sequence in [1, 3] {
            assert!(outcome.by_sequence.get(&sequence).is_none_or(|answer| !answer.finished));
        }
        pair.settles().await;
        // Its key is not live any more.
        assert_eq!(pair.stop(&call.key, 2).await.unwrap_err().code(), Code::NotFound);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn blocks_return_when_all_are_stopped_or_cancelled() {
    let mut pair = Pair::start(&[], &ROOMY).await;
    let before = num_held(&pair);
    let call = Call { temperature: 1.0, ..Call::new(1, 100, 1500) }.group(0, 4);
    let (mut stream, _) = running(&mut pair, &call, 3).await;
    let with_all = num_held(&pair);
    pair.stop(&call.key, 2).await.unwrap();
    let mut load = pair.decode.core().loaded().unwrap().steps.load();
    within(load.wait_for(|load| load.counts.running == 3)).await.unwrap();
    assert!(with_all > before);
    for sequence in [0, 1, 3] {
        pair.stop(&call.key, sequence).await.unwrap();
    }
    // Nobody reads; the stream ends nevertheless.
    pair.settles().await;
    assert_eq!(num_held(&pair), before);
    while let Some(event) = within(stream.message()).await.unwrap() {
        assert!(matches!(event.event, Some(DecodeEvent::Tokens(_))), "{event:?}");
    }
    let call = call.again(2);
    let (stream, _) = running(&mut pair, &call, 1).await;
    drop(stream);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stopping_before_the_handoff_is_done_ends_it() {
    let mut pair = Pair::start(&[], &[]).await;
    // No Prefill leg comes: the Decode leg only waits.
    let call = Call::new(1, 100, 50).group(0, 2);
    let mut stream = pair.decode(&call).await.unwrap();
    pair.stop(&call.key, 0).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    pair.stop(&call.key, 1).await.unwrap();
    assert!(within(stream.message()).await.unwrap().is_none());
    // An offer that comes later hears why.
    let outcome = prefill_to_end(pair.prefill(&call).await.unwrap()).await;
    assert!(outcome.first.is_none() && outcome.end.is_none(), "{outcome:?}");
    // One of two that is stopped early does not run.
    let call = Call { temperature: 1.0, ..Call::new(2, 100, 50) }.group(0, 2);
    let want = one_by_one(&mut pair, &call).await;
    let stream = pair.decode(&call).await.unwrap();
    pair.stop(&call.key, 0).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    let (_, rest) = tokio::join!(prefill_to_end(prefill), decode_to_end(stream));
    assert_eq!(rest.by_sequence.keys().collect::<Vec<_>>(), [&1]);
    assert_eq!(rest.by_sequence[&1].tokens, want[&1][1..]);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn terms_out_of_range_are_refused_by_both_workers() {
    let mut pair = Pair::start(&[], &[]).await;
    for (terms, words) in [
        (v1::Terms { num_sequences: 17, ..Default::default() }, ["terms.num_sequences", "16"]),
        (v1::Terms { priority: -101, ..Default::default() }, ["terms.priority", "100"]),
    ] {
        let call = Call { terms, ..Call::new(1, 10, 4) };
        for error in [pair.prefill(&call).await.unwrap_err(), pair.decode(&call).await.unwrap_err()] {
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
        }
    }
    pair.settles().await;
}
