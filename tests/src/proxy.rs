//! A link that can be broken: a TCP proxy before one decode worker, which flips bits of KV, cuts its connections or stands
//! still on demand. Control passes through it unharmed.
//!
//! A worker tells others the port of its KV service, not the host, so the proxy has the worker's two port numbers on
//! another loopback address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::grpc_bytes::GrpcBytes;

/// Where proxies listen; workers are on 127.0.0.1.
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// A read of fewer bytes may be all HTTP/2 frame heads and pings.
const PIECE: usize = 4 * 1024;

/// Pieces on their way while a delay is set; a longer line would be a slower link, not a longer one.
const LINE: usize = 4096;

/// What the link does to KV that passes.
#[derive(Default)]
struct Faults {
    num_to_flip: AtomicUsize,
    num_to_cut: AtomicUsize,
    num_bulk_bytes: AtomicUsize,
    stalled: AtomicBool,
    delay_us: AtomicU64,
}

/// A proxy; dropping it closes every connection through it.
pub struct Proxy {
    /// The worker's address as others are to know it.
    pub address: SocketAddr,
    faults: Arc<Faults>,
    wake: watch::Sender<()>,
    listeners: [JoinHandle<()>; 2],
}

#[derive(Clone)]
struct Bulk {
    faults: Arc<Faults>,
    woken: watch::Receiver<()>,
}

impl Proxy {
    /// Starts one before a worker on 127.0.0.1 with these two ports.
    ///
    /// # Panics
    /// When another process has one of the ports on the proxies' address.
    pub async fn start(worker: SocketAddr, bulk_port: u16) -> Self {
        let address = SocketAddr::new(HOST, worker.port());
        let faults = Arc::new(Faults::default());
        let (wake, woken) = watch::channel(());
        let bulk = Bulk { faults: Arc::clone(&faults), woken };
        let to_bulk = SocketAddr::new(worker.ip(), bulk_port);
        let listeners = [
            tokio::spawn(serve(listen(address).await, worker, Way { bulk: bulk.clone(), is_bulk: false })),
            tokio::spawn(serve(
                listen(SocketAddr::new(HOST, bulk_port)).await,
                to_bulk,
                Way { bulk, is_bulk: true },
            )),
        ];
        Self { address, faults, wake, listeners }
    }

    /// Flips one bit in each of the next `num` pieces of KV.
    pub fn flip(&self, num: usize) {
        self.faults.num_to_flip.store(num, Ordering::SeqCst);
    }

    /// Cuts the connection under each of the next `num` pieces of KV.
    pub fn cut(&self, num: usize) {
        self.faults.num_to_cut.store(num, Ordering::SeqCst);
    }

    /// Stops KV until called with `false`.
    pub fn stall(&self, stalled: bool) {
        self.faults.stalled.store(stalled, Ordering::SeqCst);
        self.wake.send_replace(());
    }

    /// Makes every byte, of KV and of control, take this much longer, each way; their order and rate stay.
    pub fn set_delay(&self, delay: Duration) {
        self.faults.delay_us.store(u64::try_from(delay.as_micros()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Bytes of KV that passed.
    pub fn num_bulk_bytes(&self) -> usize {
        self.faults.num_bulk_bytes.load(Ordering::SeqCst)
    }

    /// Faults that were asked for and did not happen yet.
    pub fn num_pending(&self) -> usize {
        self.faults.num_to_flip.load(Ordering::SeqCst) + self.faults.num_to_cut.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listeners.iter().for_each(JoinHandle::abort);
    }
}

async fn listen(at: SocketAddr) -> TcpListener {
    TcpListener::bind(at).await.unwrap_or_else(|error| panic!("can't listen on {at}: {error}"))
}

/// What a connection's bytes pass.
#[derive(Clone)]
struct Way {
    bulk: Bulk,
    /// Faults strike these connections only.
    is_bulk: bool,
}

async fn serve(listener: TcpListener, target: SocketAddr, way: Way) {
    // Dropped with this task, and every connection with it.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    connections.spawn(carry(client, target, way.clone()));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn carry(client: TcpStream, target: SocketAddr, way: Way) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    for stream in [&client, &server] {
        let _ = stream.set_nodelay(true);
    }
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let back = Way { is_bulk: false, ..way.clone() };
    tokio::select! {
        () = forward(client_read, server_write, way) => {}
        () = forward(server_read, client_write, back) => {}
    }
}

/// Copies until one side ends or a fault cuts it.
async fn forward(from: OwnedReadHalf, to: OwnedWriteHalf, way: Way) {
    let (line, pieces) = mpsc::channel(LINE);
    let mut out = std::pin::pin!(give_out(pieces, to));
    tokio::select! {
        is_cut = take_in(from, line, way) => {
            if !is_cut {
                // What is on its way still arrives.
                out.await;
            }
        }
        () = &mut out => {}
    }
}

/// Returns whether a fault cut the connection.
async fn take_in(mut from: OwnedReadHalf, line: mpsc::Sender<(Instant, Vec<u8>)>, mut way: Way) -> bool {
    let mut buffer = vec![0; 64 * 1024];
    let mut follower = GrpcBytes::default();
    loop {
        let Ok(length @ 1..) = from.read(&mut buffer).await else { return false };
        if way.is_bulk {
            let payload = follower.follow(&buffer[..length]);
            if length >= PIECE && !way.bulk.pass(&mut buffer[..length], &payload).await {
                return true;
            }
        }
        let delay = Duration::from_micros(way.bulk.faults.delay_us.load(Ordering::SeqCst));
        if line.send((Instant::now() + delay, buffer[..length].to_vec())).await.is_err() {
            return false;
        }
    }
}

async fn give_out(mut pieces: mpsc::Receiver<(Instant, Vec<u8>)>, mut to: OwnedWriteHalf) {
    while let Some((due, piece)) = pieces.recv().await {
        tokio::time::sleep_until(due).await;
        if to.write_all(&piece).await.is_err() {
            return;
        }
    }
}

impl Bulk {
    /// Does to a piece, and to payload in it, what is asked for; `false` cuts its connection.
    async fn pass(&mut self, piece: &mut [u8], payload: &[Range<usize>]) -> bool {
        while self.faults.stalled.load(Ordering::SeqCst) {
            let _ = tokio::time::timeout(Duration::from_secs(1), self.woken.changed()).await;
        }
        if take(&self.faults.num_to_cut) {
            return false;
        }
        if let Some(largest) = payload.iter().max_by_key(|range| range.len())
            && take(&self.faults.num_to_flip)
        {
            piece[largest.start + largest.len() / 2] ^= 0x10;
        }
        self.faults.num_bulk_bytes.fetch_add(piece.len(), Ordering::SeqCst);
        true
    }
}

fn take(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}
