//! A scripted worker's prefix cache, as far as it is told to routers.

use std::sync::Mutex;

use baton_proto::v1;
use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Status;

/// What is in it, and who reads along.
#[derive(Default)]
pub(super) struct FakeCache(Mutex<State>);

#[derive(Default)]
struct State {
    stored: Vec<[u8; 16]>,
    readers: Vec<Reader>,
    num_opened: usize,
}

struct Reader {
    sender: mpsc::Sender<Result<v1::CacheUpdate, Status>>,
    sequence: u64,
}

impl FakeCache {
    /// A new reader, who gets a snapshot first.
    pub(super) fn open(&self, instance_id: Bytes) -> mpsc::Receiver<Result<v1::CacheUpdate, Status>> {
        let mut state = self.0.lock().expect("unpoisoned");
        state.num_opened += 1;
        let (sender, receiver) = mpsc::channel(64);
        let stored = state.stored.concat().into();
        let snapshot = v1::CacheUpdate { instance_id, snapshot: true, stored, ..v1::CacheUpdate::default() };
        sender.try_send(Ok(snapshot)).expect("a reader");
        state.readers.push(Reader { sender, sequence: 1 });
        receiver
    }

    /// Blocks enter the cache.
    pub(super) fn store(&self, instance_id: &Bytes, hashes: &[[u8; 16]]) {
        let mut state = self.0.lock().expect("unpoisoned");
        state.stored.extend_from_slice(hashes);
        for reader in &mut state.readers {
            let update = v1::CacheUpdate {
                instance_id: instance_id.clone(),
                sequence: reader.sequence,
                stored: hashes.concat().into(),
                ..v1::CacheUpdate::default()
            };
            reader.sequence += 1;
            let _ = reader.sender.try_send(Ok(update));
        }
    }

    /// A message gets lost: what these blocks are is heard only in the next snapshot.
    pub(super) fn lose(&self, hashes: &[[u8; 16]]) {
        let mut state = self.0.lock().expect("unpoisoned");
        state.stored.extend_from_slice(hashes);
        for reader in &mut state.readers {
            reader.sequence += 1;
        }
    }

    pub(super) fn num_opened(&self) -> usize {
        self.0.lock().expect("unpoisoned").num_opened
    }
}
