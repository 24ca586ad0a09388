//! Whole transfers over loopback: bytes, credit, damage, lost connections.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_handoff::Cause;
use baton_proto::v1;
use baton_proto::v1::kv_stream_server::{KvStream, KvStreamServer};
use baton_telemetry::trace::TraceContext;
use baton_transfer::{BULK_WINDOW_BYTES, ReceiverEvent, Receivers, SenderConfig, SenderEvent, TokenSpan};
use support::memory::assert_same;
use support::proxy::{self, Mischief};
use support::{Destination, Driver, Origin, Outcome, PATIENCE, Rng, Sink, channel, key, layout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;

const SPAN: TokenSpan = TokenSpan { prompt_tokens: 203, skip_tokens: 0 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_layouts_and_chunkings_arrive_byte_for_byte() {
    for seed in 0..24 {
        println!("seed {seed}");
        let rng = &mut Rng(seed);
        let block_size = [1, 4, 16][rng.range(0..3)];
        let layout = layout(rng.range(1..6), rng.range(1..4), [8, 64][rng.range(0..2)], block_size);
        let prompt_tokens = rng.range(1..400);
        let skip_tokens = rng.range(0..4) * block_size * usize::from(seed % 2 == 0);
        let span = TokenSpan {
            prompt_tokens,
            skip_tokens: skip_tokens.min((prompt_tokens - 1) / block_size * block_size),
        };
        let destination = Destination::start(&layout, layout.blocks_for(prompt_tokens) + 5).await;
        let origin = Origin::new(&layout, span, rng);
        let table = destination.reserve(span, rng);
        let mut receiver = destination.grant(key(1), span, &table);
        let window = (layout.block_layer_bytes() * rng.range(1..30)) as u64;
        let mut driver = Driver::new(window, span.bytes(&layout));
        let mut sender = origin.sender(key(1), span, destination.channel(), driver.credit);
        let chunks = (0..4).map(|_| rng.range(1..9)).collect();
        let steps = origin.compute(span, chunks, Duration::from_micros(rng.range(0..200) as u64));
        assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
        steps.join().unwrap();

        assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), span);
        let (sent, report) = (sender.totals().unwrap(), receiver.report());
        assert_eq!(sent.bytes, ((prompt_tokens - span.skip_tokens) * layout.token_bytes()) as u64);
        assert_eq!((report.bytes, report.frames), (sent.bytes, sent.frames));
        assert_eq!((report.corrupt_frames, report.duplicate_frames, report.num_streams), (0, 0, 1));
        assert!(driver.max_ahead <= window, "{} bytes ahead of a window of {window}", driver.max_ahead);
        assert!(report.last_verified_at >= report.first_frame_at && report.first_frame_at.is_some());
        drop((sender, receiver));
        assert!(destination.receivers.is_empty());
    }
}

#[tokio::test]
async fn a_tiny_credit_is_never_exceeded_and_never_stops_the_transfer() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(7));
    let destination = Destination::start(&layout, 20).await;
    let origin = Origin::new(&layout, SPAN, rng);
    let table = destination.reserve(SPAN, rng);
    let mut receiver = destination.grant(key(1), SPAN, &table);
    // Exactly one block of one layer: a frame can't be smaller.
    let mut driver = Driver::new(layout.block_layer_bytes() as u64, SPAN.bytes(&layout));
    let mut sender = origin.sender(key(1), SPAN, destination.channel(), driver.credit);
    origin.progress.tokens_done(SPAN.prompt_tokens);
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    assert!(driver.max_ahead <= driver.window);
    assert_eq!(sender.totals().unwrap().frames, 3 * 13);
    assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), SPAN);
    assert!(receiver.report().credit_wait > Duration::ZERO, "the source waited for credit and said so");
}

#[tokio::test]
async fn without_credit_nothing_is_sent() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(8));
    let destination = Destination::start(&layout, 20).await;
    let origin = Origin::new(&layout, SPAN, rng);
    let table = destination.reserve(SPAN, rng);
    let receiver = destination.grant(key(1), SPAN, &table);
    let mut sender = origin.sender(key(1), SPAN, destination.channel(), 8192);
    origin.progress.tokens_done(SPAN.prompt_tokens);
    assert_eq!(sender.next().await, Some(SenderEvent::Encoded { bytes: SPAN.bytes(&layout) }));
    // One byte short of the first frame's end.
    sender.transmit(8191);
    let nothing = tokio::time::timeout(Duration::from_millis(200), sender.next()).await;
    assert!(nothing.is_err(), "{nothing:?}");
    assert_eq!(receiver.report().frames, 0);
    sender.transmit(8192);
    assert_eq!(sender.next().await, Some(SenderEvent::Sent { bytes: 8192 }));
}

#[tokio::test]
async fn a_flipped_byte_is_found_resent_and_counted() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(9));
    let destination = Destination::start(&layout, 20).await;
    let origin = Origin::new(&layout, SPAN, rng);
    // The middle of a block in the middle of the prompt.
    let pattern = origin.memory.block(1, origin.table.ids()[6])[1000..1012].to_vec();
    let (address, harm) = proxy::start(destination.address, Mischief::FlipAfter { pattern, times: 1 }).await;
    let table = destination.reserve(SPAN, rng);
    let mut receiver = destination.grant(key(1), SPAN, &table);
    let mut driver = Driver::new(64 * 1024, SPAN.bytes(&layout));
    let mut sender = origin.sender(key(1), SPAN, channel(address), driver.credit);
    origin.progress.tokens_done(SPAN.prompt_tokens);
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    assert_eq!(harm.load(Ordering::SeqCst), 1, "the proxy did flip a byte");
    assert_eq!((driver.resent, sender.totals().unwrap().resent_frames), (1, 1));
    let report = receiver.report();
    assert_eq!((report.corrupt_frames, report.duplicate_frames), (1, 0));
    assert_eq!(report.frames, sender.totals().unwrap().frames);
    assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), SPAN);
}

#[tokio::test]
async fn a_lost_connection_is_reopened_and_goes_on_from_what_was_verified() {
    let (layout, rng) = (layout(4, 2, 64, 16), &mut Rng(10));
    let span = TokenSpan { prompt_tokens: 1003, skip_tokens: 32 };
    let destination = Destination::start(&layout, 70).await;
    let (address, harm) =
        proxy::start(destination.address, Mischief::CutAfter { bytes: 500_000, times: 1 }).await;
    let origin = Origin::new(&layout, span, rng);
    let table = destination.reserve(span, rng);
    let mut receiver = destination.grant(key(1), span, &table);
    let mut driver = Driver::new(128 * 1024, span.bytes(&layout));
    let mut sender = origin.sender(key(1), span, channel(address), driver.credit);
    let steps = origin.compute(span, vec![4, 9], Duration::from_millis(1));
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    steps.join().unwrap();
    assert_eq!((harm.load(Ordering::SeqCst), driver.num_lost), (1, 1));
    let report = receiver.report();
    assert_eq!((report.bytes, report.num_streams), (span.bytes(&layout), 2));
    assert_eq!(report.duplicate_frames, 0, "it went on from what the destination said it has");
    assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), span);
}

#[tokio::test]
async fn a_connection_lost_twice_is_told_twice() {
    let (layout, rng) = (layout(4, 2, 64, 16), &mut Rng(11));
    let span = TokenSpan { prompt_tokens: 1003, skip_tokens: 0 };
    let destination = Destination::start(&layout, 70).await;
    let (address, _) =
        proxy::start(destination.address, Mischief::CutAfter { bytes: 200_000, times: 2 }).await;
    let origin = Origin::new(&layout, span, rng);
    let table = destination.reserve(span, rng);
    let mut receiver = destination.grant(key(1), span, &table);
    let mut driver = Driver::new(64 * 1024, span.bytes(&layout));
    let mut sender = origin.sender(key(1), span, channel(address), driver.credit);
    origin.progress.tokens_done(span.prompt_tokens);
    let outcome = driver.run(&mut sender, &mut receiver).await;
    assert!(matches!(outcome, Outcome::SenderEnded(Some(SenderEvent::Lost { .. }))), "{outcome:?}");
    assert!(driver.verified > 0 && driver.verified < driver.total);
}

#[tokio::test]
async fn a_fenced_sender_lets_go_of_its_blocks_and_the_destination_hears_that_it_left() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(12));
    let destination = Destination::start(&layout, 20).await;
    let origin = Origin::new(&layout, SPAN, rng);
    let table = destination.reserve(SPAN, rng);
    let mut receiver = destination.grant(key(1), SPAN, &table);
    let mut sender = origin.sender(key(1), SPAN, destination.channel(), 8192);
    origin.progress.tokens_done(SPAN.prompt_tokens);
    sender.transmit(8192);
    while receiver.report().frames == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let pool = origin.pool.clone();
    drop(origin);
    assert_eq!(pool.counts().draining, 13, "the sender pins the blocks that the sequence gave up");
    sender.fence();
    while sender.next().await.is_some() {}
    while pool.counts().draining > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(receiver.next().await, Some(ReceiverEvent::Verified { bytes: 8192 }));
    assert!(matches!(receiver.next().await, Some(ReceiverEvent::Lost { .. })));
}

#[tokio::test]
async fn the_span_travels_with_the_stream_and_waiting_for_credit_is_told() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(13));
    let destination = Destination::start(&layout, 20).await;
    let origin = Origin::new(&layout, SPAN, rng);
    let table = destination.reserve(SPAN, rng);
    let mut receiver = destination.grant(key(1), SPAN, &table);
    let mut driver = Driver::new(8192, SPAN.bytes(&layout));
    let trace = TraceContext { trace_id: [1; 16], span_id: [2; 8], sampled: true };
    let config = origin.config(key(1), SPAN, destination.channel(), driver.credit);
    let (mut sender, task) = baton_transfer::sender(SenderConfig { trace: Some(trace), ..config }).unwrap();
    assert_eq!(
        (sender.first_frame_at(), sender.credit_wait(), receiver.trace()),
        (None, Duration::ZERO, None)
    );
    tokio::spawn(task);
    origin.progress.tokens_done(SPAN.prompt_tokens);
    let begun = Instant::now();
    // Everything is computed, and nobody gave credit.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    assert_eq!(receiver.trace(), Some(trace));
    let (first, waited) = (sender.first_frame_at().unwrap(), sender.credit_wait());
    assert!(first >= begun + Duration::from_millis(50), "{:?}", first - begun);
    assert!((Duration::from_millis(40)..begun.elapsed()).contains(&waited), "{waited:?}");
}

/// A destination that answers and then reads nothing.
struct Deaf;

#[tonic::async_trait]
impl KvStream for Deaf {
    type PushStream = ReceiverStream<Result<v1::PushProgress, tonic::Status>>;

    async fn push(
        &self,
        request: tonic::Request<tonic::Streaming<v1::KvFrame>>,
    ) -> Result<tonic::Response<Self::PushStream>, tonic::Status> {
        let (answers, stream) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            let _unread = request;
            answers.closed().await;
        });
        Ok(tonic::Response::new(ReceiverStream::new(stream)))
    }
}

#[tokio::test]
async fn a_fenced_sender_lets_go_though_the_destination_reads_nothing() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(16));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder().add_service(KvStreamServer::new(Deaf));
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let span = TokenSpan { prompt_tokens: 3000, skip_tokens: 0 };
    let origin = Origin::new(&layout, span, rng);
    let sender = origin.sender(key(1), span, channel(address), u64::MAX);
    origin.progress.tokens_done(span.prompt_tokens);
    sender.transmit(u64::MAX);
    // Until the window is used up, far from the end.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let pool = origin.pool.clone();
    drop(origin);
    sender.fence();
    let settle = async {
        while pool.counts().draining > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(5), settle).await.is_ok(), "{:?}", pool.counts());
}

#[tokio::test]
async fn a_handoff_without_credit_does_not_hold_up_another_on_the_same_connection() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(13));
    let destination = Destination::start(&layout, 40).await;
    let channel = destination.channel();
    let (stuck, moving) = (Origin::new(&layout, SPAN, rng), Origin::new(&layout, SPAN, rng));
    let tables = [destination.reserve(SPAN, rng), destination.reserve(SPAN, rng)];
    let _waits = destination.grant(key(1), SPAN, &tables[0]);
    let mut receiver = destination.grant(key(2), SPAN, &tables[1]);
    let idle = stuck.sender(key(1), SPAN, channel.clone(), 8192);
    stuck.progress.tokens_done(SPAN.prompt_tokens);
    idle.transmit(8192);
    let mut driver = Driver::new(32 * 1024, SPAN.bytes(&layout));
    let mut sender = moving.sender(key(2), SPAN, channel, driver.credit);
    moving.progress.tokens_done(SPAN.prompt_tokens);
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    assert_same((&moving.memory, moving.table.ids()), (&destination.memory, tables[1].ids()), SPAN);
}

#[tokio::test]
async fn a_sender_without_a_grant_or_a_listener_says_so() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(14));
    let destination = Destination::start(&layout, 20).await;
    let origin = Origin::new(&layout, SPAN, rng);
    let mut sender = origin.sender(key(5), SPAN, destination.channel(), 8192);
    let event = sender.next().await;
    assert!(matches!(&event, Some(SenderEvent::Refused { cause: Cause::NotFound, .. })), "{event:?}");
    assert_eq!(sender.next().await, None);

    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut sender = origin.sender(key(5), SPAN, channel(nobody), 8192);
    let event = sender.next().await;
    assert!(matches!(&event, Some(SenderEvent::Lost { .. })), "{event:?}");
    assert!(sender.resend(0).is_err(), "nothing is cut yet");
}

#[tokio::test]
async fn a_lease_that_is_too_short_is_refused() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(15));
    let destination = Destination::start(&layout, 20).await;
    let origin = Origin::new(&layout, TokenSpan { prompt_tokens: 100, skip_tokens: 0 }, rng);
    let config = origin.config(key(1), SPAN, destination.channel(), 8192);
    let error = baton_transfer::sender(config).map(drop).unwrap_err();
    assert!(error.to_string().contains("the lease has 7 blocks; 203 prompt tokens take 13"), "{error}");
    // Nor a credit with which no frame could ever be sent.
    let origin = Origin::new(&layout, SPAN, rng);
    let config = origin.config(key(1), SPAN, destination.channel(), 8191);
    let error = baton_transfer::sender(config).map(drop).unwrap_err();
    assert!(error.to_string().contains("credit of 8191 bytes is less than one block"), "{error}");
}

#[tokio::test]
async fn a_credit_window_takes_a_block_and_all_windows_fit_the_connection() {
    for (layout, max_receivers) in
        [(layout(3, 2, 64, 16), 1), (layout(3, 2, 64, 16), 100), (layout(1, 8, 128, 256), 400)]
    {
        let block_bytes = layout.block_layer_bytes() as u64;
        let receivers = Receivers::new(Arc::new(Sink::new(&layout, 1)), max_receivers);
        let window = receivers.credit_window();
        assert!(window >= block_bytes.max(256 * 1024), "{window}");
        let all = window * max_receivers as u64;
        assert!(all < u64::from(BULK_WINDOW_BYTES) || window == block_bytes.max(256 * 1024), "{all}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn however_a_transfer_ends_the_blocks_return() {
    for over_shared_memory in [false, true] {
        transfers_end(over_shared_memory).await;
    }
}

async fn transfers_end(over_shared_memory: bool) {
    let layout = layout(6, 2, 64, 16);
    let destination = Destination::start(&layout, 30).await;
    for seed in 0..60 {
        println!("seed {seed}, shared memory: {over_shared_memory}");
        let rng = &mut Rng(seed);
        let origin = Origin::new(&layout, SPAN, rng);
        let table = destination.reserve(SPAN, rng);
        let mut receiver = destination.grant(key(1), SPAN, &table);
        let mut driver = Driver::new(64 * 1024, SPAN.bytes(&layout));
        let bulk = if over_shared_memory { destination.shared() } else { destination.channel().into() };
        let mut sender = origin.sender(key(1), SPAN, bulk, driver.credit);
        let steps = origin.compute(SPAN, vec![1, 3], Duration::from_micros(20));
        let moment = Duration::from_micros(rng.range(0..6000) as u64);
        // The driver is cut off somewhere, perhaps when all is done.
        let outcome = tokio::time::timeout(moment, driver.run(&mut sender, &mut receiver)).await;
        drop(table);
        match seed % 4 {
            0 => receiver.fence(),
            1 => {
                sender.fence();
                drop(receiver);
            }
            2 => drop((sender, receiver)),
            _ => {
                drop(receiver);
                // What it had told before, then its end.
                while sender.next().await.is_some() {}
            }
        }
        println!("{outcome:?}");
        steps.join().unwrap();
        let pool = origin.pool.clone();
        drop(origin);
        let settle = async {
            while pool.counts().free != pool.counts().total || destination.pool.counts().free != 30 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        assert!(
            tokio::time::timeout(PATIENCE, settle).await.is_ok(),
            "{:?} {:?}",
            pool.counts(),
            destination.pool.counts()
        );
        pool.check().unwrap();
        destination.pool.check().unwrap();
    }
}
