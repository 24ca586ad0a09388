//! KV over loopback: whole transfers at four frame sizes, and through shared memory, beside raw TCP and memcpy.
//!
//! Both ends run in one process, each on a thread of its own, as on a machine that serves both roles.

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use baton_transfer::{Bulk, SHARED_FRAME_BYTES, TokenSpan, sender_with_frames};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use support::{Destination, Driver, Origin, Outcome, Rng, key, layout};

/// 30 layers of 12 KiB a block, like the default model: 45 MiB.
const SPAN: TokenSpan = TokenSpan { prompt_tokens: 2048, skip_tokens: 0 };

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A decode worker's bulk thread.
fn start_destination(num_blocks: usize) -> Destination {
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || {
        runtime().block_on(async {
            tell.send(Destination::start(&layout(30, 3, 64, 16), num_blocks).await).unwrap();
            std::future::pending::<()>().await;
        });
    });
    told.recv().unwrap()
}

fn transfers(c: &mut Criterion) {
    let kv_layout = layout(30, 3, 64, 16);
    let rng = &mut Rng(1);
    let destination = start_destination(130);
    let origin = Origin::new(&kv_layout, SPAN, rng);
    let client = runtime();
    let channel = client.block_on(async { destination.channel() });
    let total = SPAN.bytes(&kv_layout);

    let mut group = c.benchmark_group("transfer");
    group.sample_size(10);
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Bytes(total));
    let mut transfers = |iterations: u64, bulk: &Bulk, frame_bytes: usize| {
        let mut spent = Duration::ZERO;
        for _ in 0..iterations {
            let table = destination.reserve(SPAN, rng);
            let mut receiver = destination.grant(key(1), SPAN, &table);
            spent += client.block_on(async {
                let mut driver = Driver::new(destination.receivers.credit_window(), total);
                let config = origin.config(key(1), SPAN, bulk.clone(), driver.credit);
                let began = Instant::now();
                let (mut handle, task) = sender_with_frames(config, frame_bytes).unwrap();
                tokio::spawn(task);
                origin.progress.tokens_done(SPAN.prompt_tokens);
                assert_eq!(driver.run(&mut handle, &mut receiver).await, Outcome::Delivered);
                began.elapsed()
            });
        }
        spent
    };
    let (grpc, shared) = (Bulk::from(channel.clone()), Bulk::over_shared_memory(channel));
    for frame_bytes in [64 * 1024, 128 * 1024, 256 * 1024, 1024 * 1024] {
        group.bench_with_input(BenchmarkId::new("frames", frame_bytes), &frame_bytes, |b, &frame_bytes| {
            b.iter_custom(|iterations| transfers(iterations, &grpc, frame_bytes));
        });
    }
    group.bench_function("shared_memory", |b| {
        b.iter_custom(|iterations| transfers(iterations, &shared, SHARED_FRAME_BYTES));
    });
    group.bench_function("raw_tcp", |b| b.iter_custom(|iterations| raw_tcp(total as usize, iterations)));
    group.bench_function("memcpy", |b| {
        let from = vec![1u8; total as usize];
        let mut to = vec![0u8; total as usize];
        b.iter(|| std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from)));
    });
    group.finish();
}

/// As many bytes through one socket, in writes of 1 MiB.
fn raw_tcp(total: usize, iterations: u64) -> Duration {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let reader = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut buffer = vec![0u8; 1024 * 1024];
        while socket.read(&mut buffer).unwrap() > 0 {}
    });
    let bytes = vec![7u8; 1024 * 1024];
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    let began = Instant::now();
    for _ in 0..iterations {
        let mut rest = total;
        while rest > 0 {
            let n = rest.min(bytes.len());
            socket.write_all(&bytes[..n]).unwrap();
            rest -= n;
        }
    }
    drop(socket);
    reader.join().unwrap();
    began.elapsed()
}

criterion_group!(benches, transfers);
criterion_main!(benches);
