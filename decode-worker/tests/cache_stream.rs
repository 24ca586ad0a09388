//! What a worker says about its prefix cache.

mod pair;

use std::collections::BTreeSet;
use std::time::Duration;

use baton_kv::BlockHash;
use baton_proto::v1;
use baton_proto::v1::worker_client::WorkerClient;
use baton_worker::{MAX_CACHE_WATCHERS, Running};
use pair::{Call, Pair, channel, decode_to_end, start_decode, within};
use tonic::{Code, Streaming};

const ON: [&str; 1] = ["--prefix-cache=on"];

/// A reader that builds its view from the stream alone.
struct Mirror {
    stream: Streaming<v1::CacheUpdate>,
    sequence: u64,
    num_snapshots: usize,
    known: BTreeSet<Vec<u8>>,
}

impl Mirror {
    /// With the first message taken in.
    async fn open(running: &Running) -> Self {
        let mut client = WorkerClient::new(channel(running).await);
        let stream = client.watch_cache(v1::WatchCacheRequest {}).await.unwrap().into_inner();
        let mut mirror = Self { stream, sequence: 0, num_snapshots: 0, known: BTreeSet::new() };
        mirror.next(running).await;
        assert_eq!(mirror.num_snapshots, 1, "a snapshot comes first");
        mirror
    }

    async fn next(&mut self, running: &Running) {
        let update = within(self.stream.message()).await.unwrap().expect("not over");
        self.sequence += 1;
        assert_eq!(update.sequence, self.sequence);
        assert_eq!(update.instance_id, running.core().instance.0.to_vec());
        assert!(update.stored.len() + update.removed.len() <= 64 * 1024);
        if update.snapshot {
            self.known.clear();
            self.num_snapshots += 1;
        }
        for hash in update.stored.chunks(16) {
            assert!(self.known.insert(hash.to_vec()), "stored twice");
        }
        for hash in update.removed.chunks(16) {
            assert!(self.known.remove(hash), "removed without being there");
        }
    }

    async fn until(&mut self, running: &Running, num: usize) {
        while self.known.len() != num {
            self.next(running).await;
        }
    }
}

/// Hashes of a prompt's full blocks, as a router computes them.
fn hashes(running: &Running, prompt: &[u32]) -> BTreeSet<Vec<u8>> {
    let mut hash = BlockHash::root(&running.core().loaded().unwrap().layout().cache_salt());
    let next = |block| {
        hash = hash.next(block);
        hash.0.to_vec()
    };
    prompt.chunks_exact(16).map(next).collect()
}

async fn compute(running: &Running, call: &Call) {
    let mut client = v1::decode_client::DecodeClient::new(channel(running).await);
    let stream = client.decode(call.decode(true)).await.unwrap().into_inner();
    assert!(decode_to_end(stream).await.tokens.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reader_knows_what_the_cache_knows_on_both_workers() {
    let mut pair = Pair::start(&ON, &ON).await;
    let (mut on_prefill, mut on_decode) =
        (Mirror::open(&pair.prefill).await, Mirror::open(&pair.decode).await);
    let first = Call::new(1, 100, 2);
    pair.run(&first).await;
    let mut want = hashes(&pair.decode, &first.prompt);
    assert_eq!(want.len(), 6);
    on_prefill.until(&pair.prefill, 6).await;
    on_decode.until(&pair.decode, 6).await;
    assert_eq!((&on_prefill.known, &on_decode.known), (&want, &want));
    // One that goes its own way after three blocks.
    let mut second = Call::new(2, 80, 2);
    second.prompt[..48].copy_from_slice(&first.prompt[..48]);
    pair.run(&second).await;
    want.extend(hashes(&pair.decode, &second.prompt));
    on_decode.until(&pair.decode, want.len()).await;
    assert_eq!(on_decode.known, want);
    // A later reader begins with all of it.
    assert_eq!(Mirror::open(&pair.prefill).await.known, want);
    // Opting out leaves no trace.
    let mut private = Call::new(3, 100, 2);
    private.terms.no_prefix_cache = true;
    pair.run(&private).await;
    let third = Call::new(4, 16, 2);
    pair.run(&third).await;
    want.extend(hashes(&pair.decode, &third.prompt));
    on_decode.until(&pair.decode, want.len()).await;
    assert_eq!(on_decode.known, want);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn evictions_are_told() {
    // 48 blocks.
    let running = start_decode(&["--prefix-cache=on", "--context=512", "--kv-memory=768K"]).await;
    let mut mirror = Mirror::open(&running).await;
    let mut latest = BTreeSet::new();
    for n in 0..6 {
        let call = Call::new(n, 320, 1);
        compute(&running, &call).await;
        latest = hashes(&running, &call.prompt);
    }
    let fresh = Mirror::open(&running).await;
    while mirror.known != fresh.known {
        mirror.next(&running).await;
    }
    assert!(latest.is_subset(&mirror.known) && mirror.known.len() <= 48);
    assert_eq!(mirror.num_snapshots, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reader_that_falls_behind_gets_a_snapshot() {
    let running = start_decode(&ON).await;
    let mut mirror = Mirror::open(&running).await;
    // Nobody reads: first the stream's own buffers fill, then messages are missed.
    let mut n = 0;
    while n < 1500 {
        compute(&running, &Call::new(n, 17, 1)).await;
        n += 1;
    }
    let fresh = Mirror::open(&running).await;
    while mirror.known != fresh.known {
        mirror.next(&running).await;
    }
    assert!(mirror.num_snapshots <= 3, "{}", mirror.num_snapshots);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn without_a_cache_the_stream_ends_at_once_and_with_one_when_the_worker_does() {
    let running = start_decode(&[]).await;
    let mut client = WorkerClient::new(channel(&running).await);
    let mut stream = client.watch_cache(v1::WatchCacheRequest {}).await.unwrap().into_inner();
    assert!(within(stream.message()).await.unwrap().is_none());
    let running = start_decode(&ON).await;
    let mut mirror = Mirror::open(&running).await;
    running.shutdown().await;
    let last = within(mirror.stream.message()).await;
    assert!(matches!(last, Ok(None) | Err(_)), "{last:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn cache_streams_are_bounded() {
    let running = start_decode(&ON).await;
    let mut client = WorkerClient::new(channel(&running).await);
    let mut streams = Vec::new();
    for _ in 0..MAX_CACHE_WATCHERS {
        streams.push(client.watch_cache(v1::WatchCacheRequest {}).await.unwrap().into_inner());
    }
    let error = client.watch_cache(v1::WatchCacheRequest {}).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    drop(streams);
    for _ in 0..100 {
        if client.watch_cache(v1::WatchCacheRequest {}).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("a dropped cache stream never makes room");
}
