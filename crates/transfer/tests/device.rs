//! KV through the memory of the source's device: the same bytes, the same fences, and nothing believed before the destination's own device has
//! summed it.
#![cfg(target_os = "linux")]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_handoff::Cause;
use baton_kv::{BlockMemory, BlockTable, KvLayout, peer_sum};
use baton_proto::v1;
use baton_transfer::{Bulk, Receiver, ReceiverEvent, Sender, TokenSpan, Transport, sender};
use support::by_hand::{Stream, opening, sum};
use support::device::OnDevice;
use support::memory::assert_same;
use support::proxy::{self, Mischief};
use support::{Destination, Driver, Origin, Outcome, PATIENCE, Rng, Source, channel, key, layout};
use tonic::Code;

/// Larger than a ring, so that it goes round.
const LARGE: TokenSpan = TokenSpan { prompt_tokens: 2003, skip_tokens: 0 };

/// A source on a device.
struct Device {
    origin: Origin,
    memory: Arc<OnDevice<Source>>,
}

impl Device {
    fn new(layout: &KvLayout, span: TokenSpan, rng: &mut Rng) -> Self {
        let origin = Origin::new(layout, span, rng);
        let memory = Arc::new(OnDevice::new(Arc::clone(&origin.memory)));
        Self { origin, memory }
    }

    fn bulk(&self, address: std::net::SocketAddr) -> Bulk {
        Bulk::over_device_memory(channel(address), Arc::clone(&self.memory) as _)
    }

    fn sender(&self, n: u8, span: TokenSpan, bulk: &Bulk, credit: u64) -> Sender {
        let config = self.origin.config(key(n), span, bulk.clone(), credit);
        let (handle, task) = sender(config).unwrap();
        tokio::spawn(task);
        handle
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_layouts_and_chunkings_arrive_byte_for_byte() {
    for seed in 0..16 {
        println!("seed {seed}");
        let rng = &mut Rng(seed);
        let block_size = [1, 4, 16][rng.range(0..3)];
        let layout = layout(rng.range(1..6), rng.range(1..4), [8, 64][rng.range(0..2)], block_size);
        let prompt_tokens = rng.range(1..400);
        let skipped = rng.range(0..4) * block_size;
        let skip_tokens = skipped.min((prompt_tokens - 1) / block_size * block_size);
        let span = TokenSpan { prompt_tokens, skip_tokens };
        let num_blocks = layout.blocks_for(prompt_tokens) + 5;
        let destination = Destination::on_device(Transport::Auto, &layout, num_blocks).await;
        let device = Device::new(&layout, span, rng);
        let table = destination.reserve(span, rng);
        let mut receiver = destination.grant(key(1), span, &table);
        let window = (layout.block_layer_bytes() * rng.range(1..30)) as u64;
        let mut driver = Driver::new(window, span.bytes(&layout));
        let bulk = device.bulk(destination.address);
        assert_eq!(bulk.transport(), Transport::Ipc);
        let mut sender = device.sender(1, span, &bulk, driver.credit);
        let chunks = (0..4).map(|_| rng.range(1..9)).collect();
        let pause = Duration::from_micros(rng.range(0..200) as u64);
        let steps = device.origin.compute(span, chunks, pause);
        assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
        steps.join().unwrap();
        let source = (&*device.origin.memory, device.origin.table.ids());
        assert_same(source, (&destination.memory, table.ids()), span);
        let (sent, report) = (sender.totals().unwrap(), receiver.report());
        assert_eq!((report.bytes, report.frames), (sent.bytes, sent.frames));
        assert_eq!((report.corrupt_frames, report.duplicate_frames, report.num_streams), (0, 0, 1));
        assert_eq!(device.memory.late.lock().unwrap().num_put, sent.frames, "all of it by the device");
        assert!(driver.max_ahead <= window, "{} bytes ahead of a window of {window}", driver.max_ahead);
    }
}

#[tokio::test]
async fn a_transfer_larger_than_the_ring_passes_by_the_socket_and_survives_a_lost_connection() {
    let (layout, rng) = (layout(12, 3, 64, 16), &mut Rng(31));
    let total = LARGE.bytes(&layout);
    assert!(total > 2 * 8 * 1024 * 1024, "{total} bytes go round the ring");
    for (cut_after, num_cut) in [(total as usize / 20, 0), (600, 1)] {
        let destination = Destination::on_device(Transport::Auto, &layout, 130).await;
        let mischief = Mischief::CutAfter { bytes: cut_after, times: 1 };
        let (address, harm) = proxy::start(destination.address, mischief).await;
        let device = Device::new(&layout, LARGE, rng);
        let table = destination.reserve(LARGE, rng);
        let mut receiver = destination.grant(key(1), LARGE, &table);
        let mut driver = Driver::new(8 << 20, total);
        let bulk = device.bulk(address);
        let mut sender = device.sender(1, LARGE, &bulk, driver.credit);
        device.origin.progress.tokens_done(LARGE.prompt_tokens);
        assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
        assert_eq!((harm.load(Ordering::SeqCst), driver.num_lost), (num_cut, num_cut));
        let source = (&*device.origin.memory, device.origin.table.ids());
        assert_same(source, (&destination.memory, table.ids()), LARGE);
        // The ring of the lost stream rests, since the destination may still be reading it.
        assert_eq!(device.memory.num_rings.load(Ordering::SeqCst), 1 + num_cut);
    }
}

#[tokio::test]
async fn a_destination_that_can_not_open_the_ring_is_sent_the_bytes() {
    let (layout, rng) = (layout(4, 2, 64, 16), &mut Rng(33));
    let (cpu, refusing) =
        (Destination::start(&layout, 130).await, Destination::on_device(Transport::Shm, &layout, 130).await);
    for destination in [cpu, refusing] {
        let device = Device::new(&layout, LARGE, rng);
        let table = destination.reserve(LARGE, rng);
        let mut receiver = destination.grant(key(1), LARGE, &table);
        let mut driver = Driver::new(64 * 1024, LARGE.bytes(&layout));
        let bulk = device.bulk(destination.address);
        let mut sender = device.sender(1, LARGE, &bulk, driver.credit);
        device.origin.progress.tokens_done(LARGE.prompt_tokens);
        assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
        assert_eq!((driver.num_lost, receiver.report().num_streams), (0, 1), "the handoff did not notice");
        assert_eq!(bulk.transport(), Transport::Grpc, "and no other stream tries");
        let source = (&*device.origin.memory, device.origin.table.ids());
        assert_same(source, (&destination.memory, table.ids()), LARGE);
    }
}

/// The planted fault: a frame is announced before its copy has ended.
#[tokio::test]
async fn a_frame_announced_before_its_bytes_lie_there_is_asked_for_again_and_never_believed() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(34));
    let span = TokenSpan { prompt_tokens: 208, skip_tokens: 0 };
    let destination = Destination::on_device(Transport::Auto, &layout, 20).await;
    let device = Device::new(&layout, span, rng);
    device.memory.late.lock().unwrap().payloads = vec![1, 3];
    let table = destination.reserve(span, rng);
    let mut receiver = destination.grant(key(1), span, &table);
    let mut driver = Driver::new(layout.block_layer_bytes() as u64 * 4, span.bytes(&layout));
    let bulk = device.bulk(destination.address);
    let mut sender = device.sender(1, span, &bulk, driver.credit);
    device.origin.progress.tokens_done(span.prompt_tokens);
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    assert!(driver.resent >= 1, "no late payload was noticed");
    assert_eq!(receiver.report().corrupt_frames, driver.resent);
    let source = (&*device.origin.memory, device.origin.table.ids());
    assert_same(source, (&destination.memory, table.ids()), span);
}

#[tokio::test]
async fn streams_share_a_ring_one_after_another_and_what_was_given_up_harms_nobody() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(35));
    let span = TokenSpan { prompt_tokens: 208, skip_tokens: 0 };
    let memory = Arc::new(support::Sink::new(&layout, 60));
    let seen = Arc::new(OnDevice::new(memory));
    let destination = Destination::over(Transport::Auto, &seen, 60).await;
    let device = Device::new(&layout, span, rng);
    let bulk = device.bulk(destination.address);
    for n in 1..=6 {
        let table = destination.reserve(span, rng);
        let mut receiver = destination.grant(key(n), span, &table);
        let mut driver = Driver::new(64 * 1024, span.bytes(&layout));
        let mut sender = device.sender(n, span, &bulk, driver.credit);
        device.origin.progress.tokens_done(span.prompt_tokens);
        if n == 3 {
            sender.transmit(driver.credit);
            while receiver.report().frames == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            drop((sender, receiver));
            continue;
        }
        assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
        let source = (&*device.origin.memory, device.origin.table.ids());
        assert_same(source, (&destination.memory, table.ids()), span);
    }
    assert_eq!(bulk.transport(), Transport::Ipc);
    // One that is used, one that rests; each was opened once, and what was given up is closed.
    assert_eq!(device.memory.num_rings.load(Ordering::SeqCst), 2);
    let open = async {
        while seen.num_open.load(Ordering::SeqCst) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(
        tokio::time::timeout(PATIENCE, open).await.is_ok(),
        "a view of a stream that was cut short is open"
    );
    assert!(seen.num_opened.load(Ordering::SeqCst) <= 4, "rings are kept open for the next stream");
    drop((device, bulk));
}

/// Two blocks of one layer, one frame each.
const SPAN: TokenSpan = TokenSpan { prompt_tokens: 32, skip_tokens: 0 };

/// A source that says what it likes of a ring of its own.
struct ByHand {
    ring: Box<dyn baton_kv::PeerRing>,
    destination: Destination,
    receiver: Receiver,
    table: BlockTable,
}

impl ByHand {
    async fn start() -> Self {
        let layout = layout(1, 1, 8, 16);
        let destination = Destination::on_device(Transport::Auto, &layout, 6).await;
        let table = destination.reserve(SPAN, &mut Rng(3));
        let receiver = destination.grant(key(1), SPAN, &table);
        let memory = OnDevice::new(Arc::new(Source::random(&layout, 6, &mut Rng(4))));
        let ring = memory.peer().unwrap().make_ring(8 << 20).unwrap();
        ring.mark(&[5; 1024]).unwrap();
        Self { ring, destination, receiver, table }
    }

    async fn open(&self) -> Result<Stream, tonic::Status> {
        let device_ring = self.ring.handle().to_vec().into();
        Stream::open(&self.destination, v1::KvFrame { device_ring, ..opening(key(1)) }).await
    }

    async fn next(&mut self) -> Option<ReceiverEvent> {
        tokio::time::timeout(PATIENCE, self.receiver.next()).await.expect("no event")
    }
}

/// The `nth` block at `shared_offset`, with the sum of bytes that are all `byte`, by the definition in transfer.proto.
fn frame(nth: u32, shared_offset: u64, byte: u8) -> v1::KvFrame {
    let frame = v1::KvFrame {
        index: u64::from(nth),
        offset: u64::from(nth) * 512,
        first_block: nth,
        num_blocks: 1,
        shared_offset,
        shared_len: 512,
        ..v1::KvFrame::default()
    };
    let payload_sum = peer_sum(&[byte; 512]).to_le_bytes();
    v1::KvFrame { crc32c: sum(&key(1), &frame, &payload_sum), ..frame }
}

#[tokio::test]
async fn what_lies_in_the_ring_is_verified_by_the_destinations_own_sum() {
    let mut source = ByHand::start().await;
    let mut stream = source.open().await.unwrap();
    assert_eq!(stream.answer().await.unwrap().unwrap().bytes, 0);
    stream.send(frame(0, 0, 7)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Corrupt { frame: 0 }));
    // The right sum, of another frame's place.
    stream.send(v1::KvFrame { crc32c: frame(1, 0, 5).crc32c, ..frame(0, 0, 5) }).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Corrupt { frame: 0 }));
    stream.send(frame(0, 0, 5)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Verified { bytes: 512 }));
    stream.send(frame(1, 512, 5)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Verified { bytes: 1024 }));
    assert_eq!(source.next().await, Some(ReceiverEvent::WriterEnded));
    let blocks = [0, 1].map(|nth| source.destination.memory.block(0, source.table.ids()[nth]));
    assert_eq!(blocks, [vec![5; 512], vec![5; 512]]);
}

#[tokio::test]
async fn places_outside_the_ring_end_the_stream_and_foreign_handles_are_refused() {
    for (offset, len, text) in [
        ((8 << 20) - 511, 512, "are out of range: it has 8388608"),
        (u64::MAX, 512, "are out of range"),
        (0, u32::MAX, "are out of range"),
        (0, 511, "its payload has 511 bytes; 512 are needed"),
    ] {
        let mut source = ByHand::start().await;
        let before = source.destination.memory.snapshot();
        let mut stream = source.open().await.unwrap();
        stream.answer().await.unwrap();
        stream.send(v1::KvFrame { shared_offset: offset, shared_len: len, ..frame(0, 0, 5) }).await;
        let status = stream.answer().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{text}");
        assert!(status.message().contains(text), "{} does not say {text}", status.message());
        let told = source.next().await;
        assert!(matches!(&told, Some(ReceiverEvent::Failed { cause: Cause::Protocol, .. })), "{told:?}");
        assert!(source.destination.memory.snapshot() == before, "{text}: something was written");
    }
    let source = ByHand::start().await;
    for handle in [vec![1; 64], vec![1; 3]] {
        let opening = v1::KvFrame { device_ring: handle.into(), ..opening(key(1)) };
        let status = Stream::open(&source.destination, opening).await.err().unwrap();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    }
}

#[tokio::test]
async fn after_the_fence_nothing_is_copied_out_of_the_ring_and_the_blocks_return() {
    let mut source = ByHand::start().await;
    let mut stream = source.open().await.unwrap();
    stream.answer().await.unwrap();
    stream.send(frame(0, 0, 5)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Verified { bytes: 512 }));
    source.table = BlockTable::new();
    assert_eq!(source.destination.pool.counts().draining, 2, "the lease pins what the sequence gave up");
    source.receiver.fence();
    let before = source.destination.memory.snapshot();
    stream.send(frame(1, 512, 5)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::WriterEnded));
    assert_eq!(source.destination.pool.counts().free, 6);
    assert_eq!(stream.answer().await.unwrap_err().code(), Code::Aborted);
    assert!(source.destination.memory.snapshot() == before);
}
