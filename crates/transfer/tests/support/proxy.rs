//! A TCP proxy that flips a byte or cuts the connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What happens to the bytes from client to server.
#[derive(Clone, Debug)]
pub(crate) enum Mischief {
    /// Inverts the byte after this pattern, so often.
    FlipAfter { pattern: Vec<u8>, times: usize },
    /// Drops so many connections after so many bytes.
    CutAfter { bytes: usize, times: usize },
}

/// Starts a proxy before `server`; returns its address and how often it did harm.
pub(crate) async fn start(server: SocketAddr, mischief: Mischief) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let harm = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&harm);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(server).await.unwrap();
            tokio::spawn(pass(client, server, mischief.clone(), Arc::clone(&count)));
        }
    });
    (address, harm)
}

async fn pass(client: TcpStream, server: TcpStream, mischief: Mischief, harm: Arc<AtomicUsize>) {
    let (mut client_read, mut client_write) = client.into_split();
    let (mut server_read, mut server_write) = server.into_split();
    let back = tokio::spawn(async move { tokio::io::copy(&mut server_read, &mut client_write).await });
    let mut buffer = vec![0; 64 * 1024];
    let mut passed = 0;
    while let Ok(n @ 1..) = client_read.read(&mut buffer).await {
        let bytes = &mut buffer[..n];
        match &mischief {
            Mischief::FlipAfter { pattern, times } => {
                let hit = bytes.windows(pattern.len() + 1).position(|w| w.starts_with(pattern));
                if let Some(at) = hit
                    && harm.load(Ordering::SeqCst) < *times
                {
                    bytes[at + pattern.len()] ^= 0xFF;
                    harm.fetch_add(1, Ordering::SeqCst);
                }
            }
            Mischief::CutAfter { bytes, times } => {
                if passed > *bytes && harm.load(Ordering::SeqCst) < *times {
                    harm.fetch_add(1, Ordering::SeqCst);
                    break;
                }
            }
        }
        passed += n;
        if server_write.write_all(bytes).await.is_err() {
            break;
        }
    }
    back.abort();
}
