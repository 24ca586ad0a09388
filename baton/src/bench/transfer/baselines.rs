//! What the machine can do: bytes through a socket, and from memory to memory.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Instant;

use baton_transfer::append_checksum;

use super::Sample;
use crate::bench::process::thread_cpu_s;
use crate::exit::Failure;

/// Bytes of one write or read.
const PIECE_BYTES: usize = 1024 * 1024;

/// Bytes of one block of one layer of the default model.
const BLOCK_BYTES: usize = 12 * 1024;

/// A thread that reads and throws away.
pub(super) struct Tcp {
    address: SocketAddr,
    bytes: u64,
    /// CPU seconds of each connection's reading.
    received: mpsc::Receiver<f64>,
}

fn unexpected(error: impl std::fmt::Display) -> Failure {
    Failure::Unexpected(format!("raw TCP: {error}"))
}

impl Tcp {
    /// Starts the reader; it ends with the process.
    ///
    /// # Errors
    /// [`Failure::Unexpected`] without a loopback.
    pub(super) fn start(bytes: u64) -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(unexpected)?;
        let address = listener.local_addr().map_err(unexpected)?;
        let (tell, received) = mpsc::sync_channel(1);
        std::thread::spawn(move || {
            let mut piece = vec![0; PIECE_BYTES];
            while let Ok((mut socket, _)) = listener.accept() {
                let began = thread_cpu_s();
                while socket.read(&mut piece).is_ok_and(|n| n > 0) {}
                if tell.send(thread_cpu_s() - began).is_err() {
                    return;
                }
            }
        });
        Ok(Self { address, bytes, received })
    }

    /// One connection's bytes, from the first write to the end as the reader saw it.
    ///
    /// # Errors
    /// [`Failure::Unexpected`] when the connection breaks.
    pub(super) fn transfer(&self) -> Result<Sample, Failure> {
        let piece = vec![7; PIECE_BYTES];
        let mut socket = TcpStream::connect(self.address).map_err(unexpected)?;
        let (began, cpu) = (Instant::now(), thread_cpu_s());
        let mut rest = usize::try_from(self.bytes).map_err(unexpected)?;
        while rest > 0 {
            let n = rest.min(piece.len());
            socket.write_all(&piece[..n]).map_err(unexpected)?;
            rest -= n;
        }
        drop(socket);
        let send_cpu_s = thread_cpu_s() - cpu;
        let receive_cpu_s = self.received.recv().map_err(unexpected)?;
        Ok(Sample { seconds: began.elapsed().as_secs_f64(), send_cpu_s, receive_cpu_s })
    }
}

/// Two places in memory.
pub(super) struct Copies {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Copies {
    pub(super) fn new(bytes: u64) -> Self {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        // Not zero, so that both are in memory before the first copy.
        Self { from: vec![3; len], to: vec![4; len] }
    }

    /// All of it at once.
    pub(super) fn memcpy(&mut self) -> Sample {
        let (began, cpu) = (Instant::now(), thread_cpu_s());
        std::hint::black_box(&mut self.to).copy_from_slice(std::hint::black_box(&self.from));
        sample(began, cpu)
    }

    /// Block by block, with or without the sum of each block.
    pub(super) fn blocks(&mut self, summed: bool) -> Sample {
        let (began, cpu) = (Instant::now(), thread_cpu_s());
        let mut sum = 0;
        for (from, to) in self.from.chunks(BLOCK_BYTES).zip(self.to.chunks_mut(BLOCK_BYTES)) {
            std::hint::black_box(to).copy_from_slice(from);
            if summed {
                sum = append_checksum(sum, from);
            }
        }
        std::hint::black_box(sum);
        sample(began, cpu)
    }
}

fn sample(began: Instant, cpu: f64) -> Sample {
    Sample { seconds: began.elapsed().as_secs_f64(), send_cpu_s: thread_cpu_s() - cpu, receive_cpu_s: 0.0 }
}
