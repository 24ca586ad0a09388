//! Legs end by themselves when their request's own time is up, and blocks return.

mod pair;

use std::time::{Duration, Instant};

use baton_proto::v1;
use pair::{Call, Pair, cause, decode_to_end, prefill_to_end, settles, start_prefill, within};
use tonic::Code;

/// Room for a sequence that no test waits for.
const LARGE: [&str; 2] = ["--context=131072", "--kv-memory=160M"];

fn timed(mut call: Call, timeout_ms: u64) -> Call {
    call.terms.timeout_ms = timeout_ms;
    call
}

fn took(began: Instant, timeout_ms: u64) {
    let (took, timeout) = (began.elapsed(), Duration::from_millis(timeout_ms));
    assert!(took >= timeout && took < timeout + Duration::from_secs(2), "{took:?} of {timeout:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_decode_leg_whose_source_never_comes_ends_in_time() {
    let mut pair = Pair::start(&[], &[]).await;
    let began = Instant::now();
    let decode = pair.decode(&timed(Call::new(1, 300, 50), 300)).await.unwrap();
    let outcome = decode_to_end(decode).await;
    took(began, 300);
    assert_eq!(outcome.failed.map(|failed| failed.cause()), Some(v1::Cause::Deadline));
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_prefill_leg_whose_offer_nobody_takes_ends_in_time() {
    let mut pair = Pair::start(&[], &[]).await;
    let began = Instant::now();
    let prefill = pair.prefill(&timed(Call::new(1, 300, 50), 300)).await.unwrap();
    assert_eq!(cause(&prefill_to_end(prefill).await.end), v1::Cause::Deadline);
    took(began, 300);
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_prompt_under_computation_ends_in_time() {
    let running = start_prefill(&LARGE).await;
    let mut client = v1::prefill_client::PrefillClient::new(pair::channel(&running).await);
    let began = Instant::now();
    let call = timed(Call::new(1, 120_000, 1), 300);
    let prefill = client.prefill(call.prefill(None)).await.unwrap().into_inner();
    let outcome = prefill_to_end(prefill).await;
    took(began, 300);
    assert!(outcome.first.is_none() && cause(&outcome.end) == v1::Cause::Deadline);
    settles("prefill", &running).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn both_legs_of_a_transfer_end_in_time() {
    let mut pair = Pair::start(&[&LARGE[..], &["--max-step-tokens=16"]].concat(), &LARGE).await;
    let call = timed(Call::new(1, 100_000, 50), 500);
    let began = Instant::now();
    let decode = pair.decode(&call).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    let (prefill, decode) = tokio::join!(prefill_to_end(prefill), decode_to_end(decode));
    took(began, 500);
    assert!(pair.decode.core().metrics.kv_received_bytes.get() > 0, "it was under way");
    // Whichever is first tells the other.
    assert_eq!(cause(&prefill.end), v1::Cause::Deadline);
    assert_eq!(decode.failed.map(|failed| failed.cause()), Some(v1::Cause::Deadline));
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn running_sequences_end_in_time_wherever_their_prompt_was_computed() {
    let mut pair = Pair::start(&[], &LARGE).await;
    let call = timed(Call::new(1, 100, 40_000).group(0, 2), 1500);
    let began = Instant::now();
    let decode = pair.decode(&call).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    assert!(prefill_to_end(prefill).await.first.is_some());
    let remote = decode_to_end(decode).await;
    took(began, 1500);
    let began = Instant::now();
    let local = pair.to_decode.decode(call.decode(true)).await.unwrap().into_inner();
    let local = decode_to_end(local).await;
    took(began, 1500);
    for outcome in [remote, local] {
        assert_eq!(outcome.failed.map(|failed| failed.cause()), Some(v1::Cause::Deadline));
        assert_eq!(outcome.by_sequence.len(), 2);
        let unfinished = |answer: &pair::Answer| !answer.tokens.is_empty() && !answer.finished;
        assert!(outcome.by_sequence.values().all(unfinished), "they ran");
    }
    pair.settles().await;
}

/// It stands for a router that was stopped, or whose host is gone: the connection lives and nobody reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_leg_that_nobody_reads_ends_in_time() {
    let mut pair = Pair::start(&[], &LARGE).await;
    let call = timed(Call::new(1, 100, 100_000), 2500);
    let began = Instant::now();
    let unread = pair.to_decode.decode(call.decode(true)).await.unwrap().into_inner();
    let key = call.decode(true).key.unwrap();
    // Far more than buffers and windows hold was made, so that the leg waits for room.
    let mut load = pair.decode.core().loaded().unwrap().steps.load();
    within(load.wait_for(|load| load.counts.running == 1)).await.unwrap();
    within(load.wait_for(|load| load.counts.running == 0)).await.unwrap();
    let is_live = async |pair: &mut Pair| match pair.stop(&key, 7).await.unwrap_err().code() {
        Code::InvalidArgument => true,
        Code::NotFound => false,
        other => panic!("{other}"),
    };
    if began.elapsed() < Duration::from_millis(2000) {
        assert!(is_live(&mut pair).await, "it waits for its reader");
    }
    while is_live(&mut pair).await {
        assert!(began.elapsed() < Duration::from_millis(4500), "it still waits");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    pair.settles().await;
    drop(unread);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn time_enough_changes_nothing() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call::new(1, 100, 30);
    let want = pair.run(&call).await.0;
    assert_eq!(pair.run(&timed(call.again(2), 60_000)).await.0, want);
    assert_eq!(pair.run_locally(&timed(call.again(3), 60_000)).await, want);
    pair.settles().await;
}
