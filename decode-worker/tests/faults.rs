//! Hanging up, killing and draining: blocks return, and whoever waits is told.

mod pair;

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::prefill_client::PrefillClient;
use pair::{
    Call, Pair, Random, cause, channel, decode_to_end, prefill_to_end, settles, start_prefill, within,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hanging_up_at_any_moment_returns_every_block() {
    let seed = 20_260_101;
    println!("seed {seed}");
    let mut random = Random(seed);
    let mut pair = Pair::start(&[], &[]).await;
    for round in 0..40 {
        let call = Call::new(1000 + round, 1 + random.below(900) as usize, 3000);
        let decode = pair.decode(&call).await.unwrap();
        let prefill = pair.prefill(&call).await.unwrap();
        tokio::time::sleep(Duration::from_micros(random.below(60_000))).await;
        // Either leg first, or both.
        match random.below(3) {
            0 => drop((decode, prefill)),
            1 => {
                drop(decode);
                tokio::time::sleep(Duration::from_millis(random.below(10))).await;
                drop(prefill);
            }
            _ => {
                drop(prefill);
                tokio::time::sleep(Duration::from_millis(random.below(10))).await;
                drop(decode);
            }
        }
    }
    pair.settles().await;
    let call = Call::new(1, 100, 5);
    let (tokens, _) = pair.run(&call).await;
    assert_eq!(tokens, pair.run_locally(&call).await, "after all that a request is served as ever");
    pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_prefill_worker_that_dies_in_mid_transfer_costs_the_decode_worker_nothing() {
    let mut pair = Pair::start(&["--max-step-tokens=16"], &[]).await;
    let call = Call::new(1, 4000, 50);
    let decode = pair.decode(&call).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    let mut load = pair.decode.core().loaded().unwrap().steps.load();
    within(load.wait_for(|load| load.counts.receiving == 1)).await.unwrap();
    while pair.decode.core().metrics.kv_received_bytes.get() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let Pair { prefill: dying, decode: living, .. } = pair;
    drop(dying);
    let outcome = within(decode_to_end(decode)).await;
    assert_eq!(outcome.failed.unwrap().cause(), v1::Cause::PeerLost);
    drop(prefill);
    settles("decode", &living).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_decode_worker_that_dies_in_mid_transfer_is_noticed_by_the_prefill_worker() {
    let mut pair = Pair::start(&["--max-step-tokens=16"], &[]).await;
    let call = Call::new(1, 4000, 50);
    let _decode = pair.decode(&call).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    while pair.decode.core().metrics.kv_received_bytes.get() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let Pair { prefill: living, decode: dying, .. } = pair;
    drop(dying);
    let outcome = within(prefill_to_end(prefill)).await;
    assert_eq!(cause(&outcome.end), v1::Cause::PeerLost);
    settles("prefill", &living).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn draining_lets_running_requests_end_and_takes_no_new_ones() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call::new(1, 30, 400);
    let decode = pair.decode(&call).await.unwrap();
    let prefill = pair.prefill(&call).await.unwrap();
    assert!(prefill_to_end(prefill).await.first.is_some());
    let Pair { decode: draining, mut to_decode, .. } = pair;
    let core = std::sync::Arc::clone(draining.core());
    let shutdown = tokio::spawn(draining.shutdown());
    let mut state = core.lifecycle.watch();
    state.wait_for(|state| *state == baton_worker::State::Draining).await.unwrap();
    let error = to_decode.decode(Call::new(2, 30, 5).decode(true)).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::Unavailable);
    assert_eq!(decode_to_end(decode).await.tokens.unwrap().len(), 399);
    within(shutdown).await.unwrap();
    assert!(to_decode.decode(Call::new(3, 30, 5).decode(true)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_drain_is_bounded() {
    let mut pair = Pair::start(&[], &["--drain-timeout=0.1", "--context=131072", "--kv-memory=160M"]).await;
    let stream = pair.to_decode.decode(Call::new(1, 30, 100_000).decode(true)).await.unwrap().into_inner();
    let Pair { decode: draining, .. } = pair;
    let began = std::time::Instant::now();
    draining.shutdown().await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    let outcome = within(decode_to_end(stream)).await;
    assert_eq!(outcome.failed.map(|failed| failed.cause()), Some(v1::Cause::Draining));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_giant_prompt_that_hangs_up_leaves_a_worker_as_quick_as_an_idle_one() {
    let options = ["--context=131072", "--kv-memory=160M", "--max-step-tokens=2048"];
    let running = start_prefill(&options).await;
    let mut client = PrefillClient::new(channel(&running).await);
    let giant = client.prefill(Call::new(1, 100_000, 1).prefill(None)).await.unwrap();
    while running.core().metrics.prompt_tokens_computed.get() < 4096 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(giant);
    let began = std::time::Instant::now();
    let stream = client.prefill(Call::new(2, 20, 1).prefill(None)).await.unwrap().into_inner();
    assert!(prefill_to_end(stream).await.first.is_some());
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    settles("prefill", &running).await;
    assert!(running.core().metrics.prompt_tokens_computed.get() < 50_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn two_hundred_at_once_cancelled_leave_a_worker_that_serves() {
    let mut pair = Pair::start(&[], &[]).await;
    for round in 0..2 {
        let mut legs = Vec::new();
        for n in 0..200 {
            let call = Call::new(10_000 + round * 1000 + n, 30 + n as usize, 500);
            let decode = pair.decode(&call).await.unwrap();
            let prefill = pair.prefill(&call).await.unwrap();
            legs.push((decode, prefill));
        }
        drop(legs);
        pair.settles().await;
    }
    let call = Call::new(1, 100, 5);
    assert_eq!(pair.run(&call).await.0.len(), 5);
}
