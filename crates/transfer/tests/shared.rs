//! KV through memory that both ends map: the same bytes, the same fences, and nothing believed that the other side says.
#![cfg(target_os = "linux")]

mod support;

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use baton_handoff::Cause;
use baton_kv::{BlockTable, KvLayout};
use baton_proto::v1;
use baton_transfer::{Bulk, Receiver, ReceiverEvent, TokenSpan, Transport};
use support::by_hand::{Stream, opening, sum};
use support::memory::assert_same;
use support::proxy::{self, Mischief};
use support::{Destination, Driver, Origin, Outcome, PATIENCE, Rng, channel, key, layout};
use tonic::Code;

/// Larger than a ring, so that it goes round.
const LARGE: TokenSpan = TokenSpan { prompt_tokens: 1003, skip_tokens: 0 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_layouts_and_chunkings_arrive_byte_for_byte() {
    for seed in 0..16 {
        println!("seed {seed}");
        let rng = &mut Rng(seed);
        let block_size = [1, 4, 16][rng.range(0..3)];
        let layout = layout(rng.range(1..6), rng.range(1..4), [8, 64][rng.range(0..2)], block_size);
        let prompt_tokens = rng.range(1..400);
        let skipped = rng.range(0..4) * block_size;
        let span = TokenSpan {
            prompt_tokens,
            skip_tokens: skipped.min((prompt_tokens - 1) / block_size * block_size),
        };
        let destination = Destination::start(&layout, layout.blocks_for(prompt_tokens) + 5).await;
        let origin = Origin::new(&layout, span, rng);
        let table = destination.reserve(span, rng);
        let mut receiver = destination.grant(key(1), span, &table);
        let window = (layout.block_layer_bytes() * rng.range(1..30)) as u64;
        let mut driver = Driver::new(window, span.bytes(&layout));
        let mut sender = origin.sender(key(1), span, destination.shared(), driver.credit);
        let chunks = (0..4).map(|_| rng.range(1..9)).collect();
        let steps = origin.compute(span, chunks, Duration::from_micros(rng.range(0..200) as u64));
        assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
        steps.join().unwrap();
        assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), span);
        let (sent, report) = (sender.totals().unwrap(), receiver.report());
        assert_eq!((report.bytes, report.frames), (sent.bytes, sent.frames));
        assert_eq!((report.corrupt_frames, report.duplicate_frames, report.num_streams), (0, 0, 1));
        assert!(driver.max_ahead <= window, "{} bytes ahead of a window of {window}", driver.max_ahead);
    }
}

#[tokio::test]
async fn a_transfer_larger_than_the_ring_passes_by_the_socket() {
    let (layout, rng) = (layout(12, 3, 64, 16), &mut Rng(21));
    let destination = Destination::start(&layout, 70).await;
    // The proxy would cut a connection that carried a tenth of it.
    let total = LARGE.bytes(&layout);
    let mischief = Mischief::CutAfter { bytes: total as usize / 10, times: 1 };
    let (address, harm) = proxy::start(destination.address, mischief).await;
    let origin = Origin::new(&layout, LARGE, rng);
    let table = destination.reserve(LARGE, rng);
    let mut receiver = destination.grant(key(1), LARGE, &table);
    let mut driver = Driver::new(8 << 20, total);
    let bulk = Bulk::over_shared_memory(channel(address));
    assert_eq!(bulk.transport(), Transport::Shm);
    let mut sender = origin.sender(key(1), LARGE, bulk, driver.credit);
    origin.progress.tokens_done(LARGE.prompt_tokens);
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    assert!(total > 4 * 2 * 1024 * 1024, "{total} bytes go round the ring several times");
    assert_eq!((harm.load(std::sync::atomic::Ordering::SeqCst), driver.num_lost), (0, 0));
    assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), LARGE);
}

#[tokio::test]
async fn a_lost_connection_is_reopened_with_another_ring() {
    let (layout, rng) = (layout(4, 2, 64, 16), &mut Rng(22));
    let destination = Destination::start(&layout, 70).await;
    let mischief = Mischief::CutAfter { bytes: 1500, times: 1 };
    let (address, harm) = proxy::start(destination.address, mischief).await;
    let origin = Origin::new(&layout, LARGE, rng);
    let table = destination.reserve(LARGE, rng);
    let mut receiver = destination.grant(key(1), LARGE, &table);
    let mut driver = Driver::new(64 * 1024, LARGE.bytes(&layout));
    let bulk = Bulk::over_shared_memory(channel(address));
    let mut sender = origin.sender(key(1), LARGE, bulk, driver.credit);
    let steps = origin.compute(LARGE, vec![4, 9], Duration::from_micros(300));
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    steps.join().unwrap();
    assert_eq!((harm.load(std::sync::atomic::Ordering::SeqCst), driver.num_lost), (1, 1));
    assert_eq!(receiver.report().num_streams, 2);
    assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), LARGE);
}

#[tokio::test]
async fn a_destination_that_can_not_map_is_sent_the_bytes() {
    let (layout, rng) = (layout(4, 2, 64, 16), &mut Rng(23));
    let destination = Destination::start_over(Transport::Grpc, &layout, 70).await;
    let origin = Origin::new(&layout, LARGE, rng);
    let table = destination.reserve(LARGE, rng);
    let mut receiver = destination.grant(key(1), LARGE, &table);
    let mut driver = Driver::new(64 * 1024, LARGE.bytes(&layout));
    let bulk = destination.shared();
    let mut sender = origin.sender(key(1), LARGE, bulk.clone(), driver.credit);
    origin.progress.tokens_done(LARGE.prompt_tokens);
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    assert_eq!((driver.num_lost, receiver.report().num_streams), (0, 1), "the handoff did not notice");
    assert_eq!(bulk.transport(), Transport::Grpc, "and no other stream tries");
    assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), LARGE);
}

#[tokio::test]
async fn a_ring_serves_one_stream_after_another() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(24));
    let span = TokenSpan { prompt_tokens: 208, skip_tokens: 0 };
    let destination = Destination::start(&layout, 60).await;
    let bulk = destination.shared();
    for n in 1..=6 {
        let origin = Origin::new(&layout, span, rng);
        let table = destination.reserve(span, rng);
        let mut receiver = destination.grant(key(n), span, &table);
        let mut driver = Driver::new(64 * 1024, span.bytes(&layout));
        let mut sender = origin.sender(key(n), span, bulk.clone(), driver.credit);
        origin.progress.tokens_done(span.prompt_tokens);
        if n % 3 == 0 {
            // One that is given up halfway; what it left in its ring harms nobody.
            sender.transmit(driver.credit);
            while receiver.report().frames == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            drop((sender, receiver));
            continue;
        }
        assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
        assert_same((&origin.memory, origin.table.ids()), (&destination.memory, table.ids()), span);
    }
    assert_eq!(bulk.transport(), Transport::Shm);
}

/// Waits until so many rings are kept.
async fn keeps(bulk: &Bulk, num: usize) {
    let kept = async {
        while bulk.num_kept_rings() != num {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let within = tokio::time::timeout(PATIENCE, kept).await;
    assert!(within.is_ok(), "{} rings are kept, not {num}", bulk.num_kept_rings());
}

/// Most senders are fenced before they hear that everything was delivered: the commit comes on another connection.
#[tokio::test]
async fn a_fenced_stream_leaves_its_ring_once_the_destination_reads_no_more() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(26));
    let span = TokenSpan { prompt_tokens: 208, skip_tokens: 0 };
    let total = span.bytes(&layout);
    let destination = Destination::start(&layout, 60).await;
    let bulk = destination.shared();
    for (n, is_whole) in [(1, true), (2, false), (3, true), (4, false)] {
        let mut origin = Origin::new(&layout, span, rng);
        let table = destination.reserve(span, rng);
        let mut receiver = destination.grant(key(n), span, &table);
        let sender = origin.sender(key(n), span, bulk.clone(), total);
        assert_eq!(bulk.num_kept_rings(), usize::from(n > 1));
        origin.progress.tokens_done(if is_whole { span.prompt_tokens } else { 32 });
        sender.transmit(total);
        while receiver.report().bytes < if is_whole { total } else { total / 13 * 2 } {
            let heard = tokio::time::timeout(PATIENCE, receiver.next()).await.expect("an event");
            assert!(matches!(heard, Some(ReceiverEvent::Verified { .. })), "{heard:?}");
        }
        assert_eq!(bulk.num_kept_rings(), 0, "one is in use");
        drop(sender);
        if !is_whole {
            origin.table = BlockTable::new();
            tokio::time::sleep(Duration::from_millis(100)).await;
            let counts = origin.pool.counts();
            assert_eq!(counts.free, counts.total, "blocks don't wait for the ring");
            assert_eq!(bulk.num_kept_rings(), 0, "the destination may still read it");
            receiver.fence();
        }
        keeps(&bulk, 1).await;
    }
}

#[tokio::test]
async fn the_ring_of_a_destination_that_says_nothing_is_given_up() {
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(27));
    let span = TokenSpan { prompt_tokens: 208, skip_tokens: 0 };
    let destination = Destination::start(&layout, 60).await;
    let (origin, bulk) = (Origin::new(&layout, span, rng), destination.shared());
    let table = destination.reserve(span, rng);
    let mut receiver = destination.grant(key(1), span, &table);
    let sender = origin.sender(key(1), span, bulk.clone(), span.bytes(&layout));
    origin.progress.tokens_done(32);
    sender.transmit(span.bytes(&layout));
    let next = async |receiver: &mut Receiver| tokio::time::timeout(PATIENCE, receiver.next()).await.unwrap();
    while receiver.report().bytes == 0 {
        assert!(matches!(next(&mut receiver).await, Some(ReceiverEvent::Verified { .. })));
    }
    drop(sender);
    // The stream ends with it.
    while !matches!(next(&mut receiver).await, Some(ReceiverEvent::Lost { .. })) {}
    assert_eq!(bulk.num_kept_rings(), 0);
}

/// Two blocks of one layer, one frame each.
const SPAN: TokenSpan = TokenSpan { prompt_tokens: 32, skip_tokens: 0 };

fn kv_layout() -> KvLayout {
    layout(1, 1, 8, 16)
}

/// A source that says what it likes: a file of the test's own, sealed like a real one unless told otherwise.
struct ByHand {
    file: File,
    destination: Destination,
    receiver: Receiver,
    table: BlockTable,
}

const ALL_SEALS: i32 =
    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;

impl ByHand {
    async fn start(len: u64, seals: i32) -> Self {
        // SAFETY: the name is a C string; the descriptor is nobody else's.
        let file =
            unsafe { File::from_raw_fd(libc::memfd_create(c"baton-kv".as_ptr(), libc::MFD_ALLOW_SEALING)) };
        file.set_len(len).unwrap();
        for block in 0..len / 512 {
            file.write_all_at(&[(block % 200) as u8 + 1; 512], block * 512).unwrap();
        }
        // SAFETY: the call touches no memory.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        let destination = Destination::start(&kv_layout(), 6).await;
        let table = destination.reserve(SPAN, &mut Rng(3));
        let receiver = destination.grant(key(1), SPAN, &table);
        Self { file, destination, receiver, table }
    }

    async fn open(&self) -> Result<Stream, tonic::Status> {
        let shared_path = format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd());
        Stream::open(&self.destination, v1::KvFrame { shared_path, ..opening(key(1)) }).await
    }

    async fn next(&mut self) -> Option<ReceiverEvent> {
        tokio::time::timeout(PATIENCE, self.receiver.next()).await.expect("no event")
    }
}

/// The `nth` block, said to lie at `shared_offset`, with the sum of bytes that are all `byte`.
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
    v1::KvFrame { crc32c: sum(&key(1), &frame, &[byte; 512]), ..frame }
}

#[tokio::test]
async fn what_lies_in_the_ring_is_verified_and_a_wrong_byte_is_told_each_time() {
    let mut source = ByHand::start(4096, ALL_SEALS).await;
    let mut stream = source.open().await.unwrap();
    assert_eq!(stream.answer().await.unwrap().unwrap().bytes, 0);
    // The bytes at 512 are 2.
    stream.send(frame(0, 512, 7)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Corrupt { frame: 0 }));
    stream.send(frame(0, 512, 8)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Corrupt { frame: 0 }));
    stream.send(frame(0, 512, 2)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Verified { bytes: 512 }));
    // A quarter of the memory was read: the source is told, with what is verified.
    let progress = stream.answer().await.unwrap().unwrap();
    assert_eq!((progress.shared_read, progress.bytes), (2, 0));
    stream.send(frame(1, 3584, 8)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Verified { bytes: 1024 }));
    assert_eq!(source.next().await, Some(ReceiverEvent::WriterEnded));
    assert_eq!(source.receiver.report().corrupt_frames, 2);
    let blocks = [0, 1].map(|nth| source.destination.memory.block(0, source.table.ids()[nth]));
    assert_eq!(blocks, [vec![2; 512], vec![8; 512]]);
}

#[tokio::test]
async fn places_outside_the_file_end_the_stream_and_write_nothing() {
    type Spoil = fn(&mut v1::KvFrame);
    let cases: [(Spoil, &str); 6] = [
        (
            |f| f.shared_offset = 4096 - 511,
            "512 bytes at 3585 of shared memory are out of range: it has 4096",
        ),
        (|f| f.shared_offset = u64::MAX, "are out of range"),
        (|f| f.shared_offset = u64::MAX - 511, "are out of range"),
        (|f| f.shared_len = u32::MAX, "are out of range"),
        (|f| f.shared_len = 511, "its payload has 511 bytes; 512 are needed"),
        (|f| f.payload = vec![1; 512].into(), "a payload and a shared payload"),
    ];
    for (spoil, text) in cases {
        let mut source = ByHand::start(4096, ALL_SEALS).await;
        let before = source.destination.memory.snapshot();
        let mut stream = source.open().await.unwrap();
        stream.answer().await.unwrap();
        let mut bad = frame(0, 0, 1);
        spoil(&mut bad);
        stream.send(bad).await;
        let status = stream.answer().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{text}");
        assert!(status.message().contains(text), "{} does not say {text}", status.message());
        let told = source.next().await;
        assert!(matches!(&told, Some(ReceiverEvent::Failed { cause: Cause::Protocol, .. })), "{told:?}");
        assert!(source.destination.memory.snapshot() == before, "{text}: something was written");
    }
}

#[tokio::test]
async fn a_shared_payload_needs_shared_memory() {
    let mut source = ByHand::start(4096, ALL_SEALS).await;
    let mut stream = Stream::open(&source.destination, opening(key(1))).await.unwrap();
    stream.answer().await.unwrap();
    stream.send(frame(0, 0, 1)).await;
    let status = stream.answer().await.unwrap_err();
    assert!(status.message().contains("the stream has no shared memory"), "{status}");
    assert!(matches!(source.next().await, Some(ReceiverEvent::Failed { .. })));
}

#[tokio::test]
async fn a_file_that_could_be_cut_short_or_is_too_large_is_refused_before_it_is_read() {
    for (len, seals, text) in [
        (4096, 0, "not sealed"),
        (4096, libc::F_SEAL_GROW | libc::F_SEAL_SEAL, "not sealed"),
        (64 << 20, ALL_SEALS, "has 67108864 bytes"),
    ] {
        let source = ByHand::start(len, seals).await;
        let status = source.open().await.err().unwrap();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
        assert!(status.message().contains(text), "{status}");
        assert_eq!(source.receiver.report().num_streams, 0);
    }
    let source = ByHand::start(4096, ALL_SEALS).await;
    for foreign in ["/etc/hostname", "/dev/shm/baton", "/proc/self/fd/0", "/proc/1/mem"] {
        let opening = v1::KvFrame { shared_path: foreign.to_owned(), ..opening(key(1)) };
        let status = Stream::open(&source.destination, opening).await.err().unwrap();
        assert_eq!(status.code(), Code::FailedPrecondition, "{foreign}: {status}");
    }
}

#[tokio::test]
async fn after_the_fence_nothing_is_copied_out_of_the_ring_and_the_blocks_return() {
    let mut source = ByHand::start(4096, ALL_SEALS).await;
    let mut stream = source.open().await.unwrap();
    stream.answer().await.unwrap();
    stream.send(frame(0, 0, 1)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::Verified { bytes: 512 }));
    source.table = BlockTable::new();
    assert_eq!(source.destination.pool.counts().draining, 2, "the lease pins what the sequence gave up");
    source.receiver.fence();
    let before = source.destination.memory.snapshot();
    stream.send(frame(1, 512, 2)).await;
    assert_eq!(source.next().await, Some(ReceiverEvent::WriterEnded));
    assert_eq!(source.destination.pool.counts().free, 6);
    assert_eq!(stream.answer().await.unwrap_err().code(), Code::Aborted);
    assert!(source.destination.memory.snapshot() == before);
}

#[tokio::test]
async fn nothing_of_it_is_left_behind() {
    let names = || -> Vec<_> {
        std::fs::read_dir("/dev/shm")
            .map(|all| all.flatten().map(|entry| entry.file_name()).collect())
            .unwrap_or_default()
    };
    let before = names();
    let (layout, rng) = (layout(3, 2, 64, 16), &mut Rng(25));
    let span = TokenSpan { prompt_tokens: 203, skip_tokens: 0 };
    let destination = Destination::start(&layout, 20).await;
    let origin = Origin::new(&layout, span, rng);
    let table = destination.reserve(span, rng);
    let mut receiver = destination.grant(key(1), span, &table);
    let mut driver = Driver::new(64 * 1024, span.bytes(&layout));
    let mut sender = origin.sender(key(1), span, destination.shared(), driver.credit);
    origin.progress.tokens_done(span.prompt_tokens);
    assert_eq!(driver.run(&mut sender, &mut receiver).await, Outcome::Delivered);
    assert!(names().iter().all(|name| before.contains(name) || !name.to_string_lossy().contains("baton")));
    // The other tests of this process have mappings of their own, which go as well.
    let left = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:baton-kv").count();
    let gone = async {
        while left() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, gone).await.is_ok(), "{} mappings are left", left());
}
