//! What a receiver takes and refuses, told by a source that builds its frames by hand.

mod support;

use std::time::Duration;

use baton_handoff::Cause;
use baton_kv::{BlockTable, KvLayout};
use baton_proto::v1;
use baton_transfer::{Grant, Receiver, ReceiverEvent, TokenSpan, TransferError, wire};
use support::by_hand::{Stream, opening, seal};
use support::{Destination, PATIENCE, Rng, key, layout};
use tonic::Code;

/// Three blocks of 16 tokens are skipped, then two whole ones and 5 tokens follow.
const SPAN: TokenSpan = TokenSpan { prompt_tokens: 85, skip_tokens: 48 };

fn kv_layout() -> KvLayout {
    layout(2, 1, 8, 16)
}

struct Setup {
    destination: Destination,
    receiver: Receiver,
    table: BlockTable,
}

async fn setup() -> Setup {
    let destination = Destination::start(&kv_layout(), 12).await;
    let table = destination.reserve(SPAN, &mut Rng(3));
    let receiver = destination.grant(key(1), SPAN, &table);
    Setup { destination, receiver, table }
}

/// The handoff's frames: for each layer two whole blocks, then the tail. Payload bytes tell their frame.
fn frames() -> Vec<v1::KvFrame> {
    let block_bytes = kv_layout().block_layer_bytes();
    let tail_bytes = block_bytes / 16 * 5;
    let mut all = Vec::new();
    for layer in 0..2u32 {
        let start = u64::from(layer) * (2 * block_bytes + tail_bytes) as u64;
        for (tail_tokens, first_block, num_blocks, len) in [(0, 3, 2, 2 * block_bytes), (5, 5, 1, tail_bytes)]
        {
            let index = all.len() as u64;
            let frame = v1::KvFrame {
                index,
                offset: start + if tail_tokens == 0 { 0 } else { 2 * block_bytes as u64 },
                layer,
                first_block,
                num_blocks,
                tail_tokens,
                payload: vec![index as u8 + 1; len].into(),
                ..v1::KvFrame::default()
            };
            all.push(seal(&key(1), frame));
        }
    }
    all
}

async fn next(receiver: &mut Receiver) -> Option<ReceiverEvent> {
    tokio::time::timeout(PATIENCE, receiver.next()).await.expect("no event")
}

/// Events up to and including the one after which nothing follows.
async fn rest(receiver: &mut Receiver) -> Vec<ReceiverEvent> {
    let mut all = Vec::new();
    while let Some(event) = next(receiver).await {
        all.push(event);
    }
    all
}

#[tokio::test]
async fn frames_built_by_hand_fill_the_blocks() {
    let Setup { destination, mut receiver, table } = setup().await;
    let mut stream = Stream::open(&destination, opening(key(1))).await.unwrap();
    assert_eq!(stream.answer().await.unwrap().unwrap().bytes, 0);
    for frame in frames() {
        stream.send(frame).await;
    }
    let whole = SPAN.bytes(&kv_layout());
    assert_eq!(
        stream.answer().await.unwrap(),
        Some(v1::PushProgress { bytes: whole, frames: 4, shared_read: 0 })
    );
    assert_eq!(stream.answer().await.unwrap(), None, "the stream ends well");
    let events = rest(&mut receiver).await;
    assert_eq!(events.last(), Some(&ReceiverEvent::WriterEnded));
    assert_eq!(events.iter().rev().nth(1), Some(&ReceiverEvent::Verified { bytes: whole }));
    let blocks = |nth: usize| destination.memory.block(1, table.ids()[nth]);
    assert!(blocks(4).iter().all(|&byte| byte == 3));
    let tail = blocks(5);
    assert_eq!(tail.iter().filter(|&&byte| byte == 4).count(), tail.len() / 16 * 5);
    assert_eq!(
        tail.iter().filter(|&&byte| byte == 0).count(),
        tail.len() / 16 * 11,
        "nothing else is written"
    );

    // A source that missed the answer asks once more.
    let mut again = Stream::open(&destination, opening(key(1))).await.unwrap();
    assert_eq!(again.answer().await.unwrap().unwrap().bytes, whole);
    assert_eq!(again.answer().await.unwrap(), None);
}

#[tokio::test]
async fn a_key_that_was_not_granted_is_not_found() {
    let Setup { destination, receiver, .. } = setup().await;
    let refused = |opening| async { Stream::open(&destination, opening).await.err().unwrap() };
    assert_eq!(refused(opening(key(2))).await.code(), Code::NotFound);
    let status = refused(v1::KvFrame::default()).await;
    assert_eq!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "protocol violation: key: is absent")
    );
    assert_eq!(refused(frames().remove(0)).await.code(), Code::InvalidArgument);
    drop(receiver);
    assert_eq!(
        refused(opening(key(1))).await.code(),
        Code::NotFound,
        "a handle that is gone takes its key along"
    );
}

#[tokio::test]
async fn every_field_out_of_range_ends_the_stream_and_writes_nothing() {
    type Spoil = fn(&mut v1::KvFrame);
    let cases: [(usize, Spoil, &str); 12] = [
        (0, |f| f.index = 12, "its index is out of range: at most 12"),
        (0, |f| f.layer = 2, "layer 2 is out of range: there are 2"),
        (0, |f| f.first_block = 2, "2 blocks from 2 are out of range 3..5"),
        (0, |f| f.first_block = 4, "2 blocks from 4 are out of range 3..5"),
        (0, |f| f.first_block = u32::MAX, "out of range 3..5"),
        (0, |f| f.num_blocks = 0, "0 blocks from 3"),
        (0, |f| f.num_blocks = 1, "its payload has 1024 bytes; 512 are needed"),
        (0, |f| f.offset = u64::MAX, "is out of range: the stream has 2368 bytes"),
        (0, |f| f.offset = 2000, "offset 2000 is out of range"),
        (0, |f| f.key = Some(wire::encode_key(&key(1))), "a key belongs on the first message only"),
        (1, |f| f.tail_tokens = 6, "6 tokens of 1 blocks from 5: the last block, 5, has 5"),
        (1, |f| f.first_block = 4, "5 tokens of 1 blocks from 4"),
    ];
    for (which, spoil, text) in cases {
        let Setup { destination, mut receiver, .. } = setup().await;
        let before = destination.memory.snapshot();
        let mut frame = frames().remove(which);
        spoil(&mut frame);
        let mut stream = Stream::open(&destination, opening(key(1))).await.unwrap();
        stream.answer().await.unwrap();
        stream.send(seal(&key(1), frame)).await;
        let status = stream.answer().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{text}");
        assert!(status.message().contains(text), "{} does not say {text}", status.message());
        let told = next(&mut receiver).await;
        assert!(
            matches!(&told, Some(ReceiverEvent::Failed { cause: Cause::Protocol, detail }) if detail.contains(text)),
            "{told:?}"
        );
        assert!(destination.memory.snapshot() == before, "{text}: something was written");
    }
}

#[tokio::test]
async fn a_damaged_frame_is_told_and_taken_when_it_comes_again() {
    let Setup { destination, mut receiver, table } = setup().await;
    let good = frames();
    let stream = Stream::open(&destination, opening(key(1))).await.unwrap();
    let mut payload = good[0].payload.to_vec();
    payload[700] ^= 1;
    stream.send(v1::KvFrame { payload: payload.into(), ..good[0].clone() }).await;
    assert_eq!(next(&mut receiver).await, Some(ReceiverEvent::Corrupt { frame: 0 }));
    // The header is summed too: this would put layer 1's bytes where layer 0's belong.
    stream.send(v1::KvFrame { layer: 0, ..good[3].clone() }).await;
    assert_eq!(next(&mut receiver).await, Some(ReceiverEvent::Corrupt { frame: 3 }));
    for frame in [1, 2, 3] {
        stream.send(good[frame].clone()).await;
    }
    while receiver.report().frames < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let nothing = tokio::time::timeout(Duration::from_millis(50), receiver.next()).await;
    assert!(nothing.is_err(), "nothing counts as verified beyond the gap: {nothing:?}");
    stream.send(good[0].clone()).await;
    let whole = SPAN.bytes(&kv_layout());
    let events = rest(&mut receiver).await;
    assert_eq!(events, [ReceiverEvent::Verified { bytes: whole }, ReceiverEvent::WriterEnded]);
    assert_eq!((receiver.report().corrupt_frames, receiver.report().frames), (2, 4));
    assert!(destination.memory.block(0, table.ids()[3]).iter().all(|&byte| byte == 1));
}

#[tokio::test]
async fn a_duplicate_is_counted_and_never_written() {
    let Setup { destination, mut receiver, table } = setup().await;
    let good = frames();
    let mut stream = Stream::open(&destination, opening(key(1))).await.unwrap();
    stream.answer().await.unwrap();
    stream.send(good[0].clone()).await;
    assert_eq!(next(&mut receiver).await, Some(ReceiverEvent::Verified { bytes: 1024 }));
    let other = v1::KvFrame { payload: vec![99; 1024].into(), ..good[0].clone() };
    stream.send(seal(&key(1), other)).await;
    stream.send(good[1].clone()).await;
    assert_eq!(next(&mut receiver).await, Some(ReceiverEvent::Verified { bytes: 1024 + 160 }));
    assert_eq!(receiver.report().duplicate_frames, 1);
    assert!(destination.memory.block(0, table.ids()[3]).iter().all(|&byte| byte == 1));

    // Half new, half verified is no frame of any cut that this handoff had.
    let overlap = v1::KvFrame { layer: 1, num_blocks: 1, payload: vec![1; 512].into(), ..good[2].clone() };
    stream.send(seal(&key(1), overlap)).await;
    stream.send(good[2].clone()).await;
    let status = stream.answer().await.unwrap_err();
    assert!(status.message().contains("overlaps blocks that are verified"), "{status}");
}

#[tokio::test]
async fn offsets_that_lie_are_found_at_the_latest_when_every_block_is_there() {
    let Setup { destination, mut receiver, .. } = setup().await;
    let mut stream = Stream::open(&destination, opening(key(1))).await.unwrap();
    stream.answer().await.unwrap();
    for frame in frames() {
        stream.send(seal(&key(1), v1::KvFrame { offset: 0, ..frame })).await;
    }
    assert!(stream.answer().await.unwrap_err().message().contains("offset"));
    let events = [next(&mut receiver).await, next(&mut receiver).await];
    assert!(matches!(events[1], Some(ReceiverEvent::Failed { cause: Cause::Protocol, .. })), "{events:?}");
}

#[tokio::test]
async fn after_the_fence_no_byte_is_written_and_the_blocks_return() {
    let Setup { destination, mut receiver, table } = setup().await;
    let good = frames();
    let mut stream = Stream::open(&destination, opening(key(1))).await.unwrap();
    stream.answer().await.unwrap();
    stream.send(good[0].clone()).await;
    assert_eq!(next(&mut receiver).await, Some(ReceiverEvent::Verified { bytes: 1024 }));
    drop(table);
    assert_eq!(destination.pool.counts().draining, 3, "the lease pins what the sequence gave up");
    receiver.fence();
    let before = destination.memory.snapshot();
    stream.send(good[1].clone()).await;
    stream.send(good[2].clone()).await;
    assert_eq!(rest(&mut receiver).await, [ReceiverEvent::WriterEnded]);
    assert_eq!(destination.pool.counts().free, 12);
    let status = stream.answer().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Aborted, "the handoff is over"));
    assert!(destination.memory.snapshot() == before);
    let late = Stream::open(&destination, opening(key(1))).await.err().unwrap();
    assert_eq!(late.code(), Code::Aborted);
}

#[tokio::test]
async fn a_fence_without_a_stream_ends_the_writer_at_once() {
    let Setup { destination, mut receiver, table } = setup().await;
    drop(table);
    receiver.fence();
    assert_eq!(destination.pool.counts().free, 12);
    assert_eq!(rest(&mut receiver).await, [ReceiverEvent::WriterEnded]);
}

#[tokio::test]
async fn dropping_the_handle_returns_the_blocks_though_a_stream_is_open() {
    let Setup { destination, receiver, table } = setup().await;
    let mut stream = Stream::open(&destination, opening(key(1))).await.unwrap();
    stream.answer().await.unwrap();
    drop((table, receiver));
    assert_eq!(stream.answer().await.unwrap_err().code(), Code::Aborted);
    assert_eq!(destination.pool.counts().free, 12);
    assert!(destination.receivers.is_empty());
}

#[tokio::test]
async fn a_newer_stream_takes_over_and_is_told_what_is_verified() {
    let Setup { destination, mut receiver, .. } = setup().await;
    let good = frames();
    let mut older = Stream::open(&destination, opening(key(1))).await.unwrap();
    older.answer().await.unwrap();
    older.send(good[0].clone()).await;
    assert_eq!(next(&mut receiver).await, Some(ReceiverEvent::Verified { bytes: 1024 }));
    let mut newer = Stream::open(&destination, opening(key(1))).await.unwrap();
    assert_eq!(
        newer.answer().await.unwrap(),
        Some(v1::PushProgress { bytes: 1024, frames: 1, shared_read: 0 })
    );
    older.send(good[1].clone()).await;
    assert_eq!(older.answer().await.unwrap_err().code(), Code::Aborted);
    for frame in &good[1..] {
        newer.send(frame.clone()).await;
    }
    let events = rest(&mut receiver).await;
    assert!(!events.iter().any(|event| matches!(event, ReceiverEvent::Lost { .. })), "{events:?}");
    assert_eq!(receiver.report().num_streams, 2);
    assert_eq!(receiver.report().bytes, SPAN.bytes(&kv_layout()));
}

#[tokio::test]
async fn a_source_that_leaves_early_is_told_and_the_lease_stays_for_the_next_stream() {
    let Setup { destination, mut receiver, .. } = setup().await;
    let stream = Stream::open(&destination, opening(key(1))).await.unwrap();
    drop(stream);
    assert!(matches!(next(&mut receiver).await, Some(ReceiverEvent::Lost { .. })));
    let stream = Stream::open(&destination, opening(key(1))).await.unwrap();
    for frame in frames() {
        stream.send(frame).await;
    }
    assert_eq!(rest(&mut receiver).await.last(), Some(&ReceiverEvent::WriterEnded));
}

#[tokio::test]
async fn grants_are_bounded_unique_and_fit_their_lease() {
    let Setup { destination, receiver, table } = setup().await;
    let grant = |n, skip| {
        let lease = table.write_lease(skip).unwrap();
        destination.receivers.grant(Grant { key: key(n), span: SPAN, lease }).map(drop).unwrap_err()
    };
    assert_eq!(grant(1, 3), TransferError::Duplicate(key(1)));
    assert!(grant(2, 2).to_string().contains("the lease has blocks 2..6 of 3..6"));
    let short = destination.reserve(TokenSpan { prompt_tokens: 64, skip_tokens: 0 }, &mut Rng(5));
    let lease = short.write_lease(3).unwrap();
    let error = destination.receivers.grant(Grant { key: key(2), span: SPAN, lease }).map(drop).unwrap_err();
    assert!(error.to_string().contains("the lease has blocks 3..4 of 3..6"), "{error}");

    let more = || {
        destination.receivers.grant(Grant { key: key(9), span: SPAN, lease: table.write_lease(3).unwrap() })
    };
    let held: Vec<_> = (2..5)
        .map(|n| {
            let lease = table.write_lease(3).unwrap();
            destination.receivers.grant(Grant { key: key(n), span: SPAN, lease }).unwrap()
        })
        .collect();
    assert_eq!(
        more().map(drop).unwrap_err(),
        TransferError::Full { what: "handoffs being received", limit: 4 }
    );
    drop(held);
    assert!(more().is_ok());
    drop(receiver);
}
