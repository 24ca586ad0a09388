//! A link that can be broken: a TCP proxy before one decode worker, which flips bits of KV, cuts its connections or stands
//! still on demand. Control passes through it unharmed.
//!
//! A worker tells others the port of its KV service, not the host, so the proxy has the worker's two port numbers on
//! another loopback address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Where proxies listen; workers are on 127.0.0.1.
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// A read of fewer bytes may be all HTTP/2 frame heads and pings.
const PIECE: usize = 4 * 1024;

/// What the link does to KV that passes.
#[derive(Default)]
struct Faults {
    num_to_flip: AtomicUsize,
    num_to_cut: AtomicUsize,
    num_bulk_bytes: AtomicUsize,
    stalled: AtomicBool,
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
            tokio::spawn(serve(listen(address).await, worker, None)),
            tokio::spawn(serve(listen(SocketAddr::new(HOST, bulk_port)).await, to_bulk, Some(bulk))),
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

async fn serve(listener: TcpListener, target: SocketAddr, bulk: Option<Bulk>) {
    // Dropped with this task, and every connection with it.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    connections.spawn(carry(client, target, bulk.clone()));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn carry(client: TcpStream, target: SocketAddr, bulk: Option<Bulk>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    for stream in [&client, &server] {
        let _ = stream.set_nodelay(true);
    }
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    tokio::select! {
        () = forward(client_read, server_write, bulk) => {}
        () = forward(server_read, client_write, None) => {}
    }
}

/// Copies until one side ends or a fault cuts it.
async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut bulk: Option<Bulk>) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let Ok(length @ 1..) = from.read(&mut buffer).await else { return };
        if let Some(bulk) = bulk.as_mut().filter(|_| length >= PIECE)
            && !bulk.pass(&mut buffer[..length]).await
        {
            return;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

impl Bulk {
    /// Does to a piece what is asked for; `false` cuts its connection.
    async fn pass(&mut self, piece: &mut [u8]) -> bool {
        while self.faults.stalled.load(Ordering::SeqCst) {
            let _ = tokio::time::timeout(Duration::from_secs(1), self.woken.changed()).await;
        }
        if take(&self.faults.num_to_cut) {
            return false;
        }
        if take(&self.faults.num_to_flip) {
            // The middle of a large piece is payload, not a frame's head.
            piece[piece.len() / 2] ^= 0x10;
        }
        self.faults.num_bulk_bytes.fetch_add(piece.len(), Ordering::SeqCst);
        true
    }
}

fn take(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}
