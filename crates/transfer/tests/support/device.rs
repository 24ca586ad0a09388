//! Devices in plain vectors whose rings are found by their handles, as a driver would find them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use baton_kv::{
    BlockMemory, BlockOrder, BlockRun, BlockSlice, KvLayout, MemoryError, PeerCopy, PeerMemory, PeerRing,
    PeerView, ReadLease, WriteLease, peer_sum,
};

type Bytes = Arc<Mutex<Vec<u8>>>;

/// Every ring of this process.
fn rings() -> MutexGuard<'static, HashMap<Vec<u8>, Bytes>> {
    static RINGS: OnceLock<Mutex<HashMap<Vec<u8>, Bytes>>> = OnceLock::new();
    RINGS.get_or_init(Mutex::default).lock().unwrap()
}

/// Block memory that lies on a device.
pub(crate) struct OnDevice<M> {
    pub(crate) memory: Arc<M>,
    /// Rings made and not freed; views open now; views opened since the start.
    pub(crate) num_rings: Arc<AtomicUsize>,
    pub(crate) num_open: Arc<AtomicUsize>,
    pub(crate) num_opened: AtomicUsize,
    /// From the n-th payload on, some bytes come into a ring only with the next payload: a copy that was not waited for.
    pub(crate) late: Arc<Mutex<Lateness>>,
}

/// Which payloads come late.
#[derive(Default)]
pub(crate) struct Lateness {
    pub(crate) payloads: Vec<u64>,
    pub(crate) num_put: u64,
    held_back: Vec<(Bytes, usize, Vec<u8>)>,
}

impl<M> OnDevice<M> {
    pub(crate) fn new(memory: Arc<M>) -> Self {
        Self {
            memory,
            num_rings: Arc::default(),
            num_open: Arc::default(),
            num_opened: AtomicUsize::new(0),
            late: Arc::default(),
        }
    }
}

struct Ring<M> {
    handle: Vec<u8>,
    bytes: Bytes,
    memory: Arc<M>,
    num_rings: Arc<AtomicUsize>,
    late: Arc<Mutex<Lateness>>,
}

struct View<M> {
    bytes: Bytes,
    memory: Arc<M>,
    num_open: Arc<AtomicUsize>,
}

impl<M: BlockMemory + 'static> PeerMemory for OnDevice<M> {
    fn make_ring(&self, len: usize) -> Result<Box<dyn PeerRing>, MemoryError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut handle = vec![0xAB; 64];
        handle[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::SeqCst).to_le_bytes());
        let bytes = Bytes::new(Mutex::new(vec![0xFF; len]));
        rings().insert(handle.clone(), Arc::clone(&bytes));
        self.num_rings.fetch_add(1, Ordering::SeqCst);
        let (memory, late) = (Arc::clone(&self.memory), Arc::clone(&self.late));
        Ok(Box::new(Ring { handle, bytes, memory, num_rings: Arc::clone(&self.num_rings), late }))
    }

    fn open_ring(&self, handle: &[u8], len: usize) -> Result<Box<dyn PeerView>, MemoryError> {
        let found = rings().get(handle).cloned();
        let bytes = found.ok_or_else(|| MemoryError::Device("the handle is none".to_owned()))?;
        assert_eq!(bytes.lock().unwrap().len(), len);
        self.num_open.fetch_add(1, Ordering::SeqCst);
        self.num_opened.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(View { bytes, memory: Arc::clone(&self.memory), num_open: Arc::clone(&self.num_open) }))
    }
}

impl<M> Drop for Ring<M> {
    fn drop(&mut self) {
        rings().remove(&self.handle);
        self.num_rings.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<M> Drop for View<M> {
    fn drop(&mut self) {
        self.num_open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<M: BlockMemory> PeerRing for Ring<M> {
    fn handle(&self) -> &[u8] {
        &self.handle
    }

    fn mark(&self, bytes: &[u8]) -> Result<(), MemoryError> {
        self.bytes.lock().unwrap()[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn put(&self, lease: &ReadLease, copy: PeerCopy) -> Result<u64, MemoryError> {
        let mut payload = Vec::new();
        for nth in copy.run.first..copy.run.first + copy.run.num_blocks {
            let at = BlockSlice { layer: copy.run.layer, nth, num_tokens: copy.num_tokens };
            self.memory.gather(lease, at, &mut payload)?;
        }
        assert_eq!(payload.len(), copy.num_bytes(self.memory.layout()));
        let sum = peer_sum(&payload);
        let mut late = self.late.lock().unwrap();
        for (bytes, at, payload) in std::mem::take(&mut late.held_back) {
            bytes.lock().unwrap()[at..at + payload.len()].copy_from_slice(&payload);
        }
        let nth = late.num_put;
        late.num_put += 1;
        if late.payloads.contains(&nth) {
            late.held_back.push((Arc::clone(&self.bytes), copy.offset, payload));
        } else {
            self.bytes.lock().unwrap()[copy.offset..copy.offset + payload.len()].copy_from_slice(&payload);
        }
        Ok(sum)
    }
}

impl<M: BlockMemory> PeerView for View<M> {
    fn num_bytes(&self) -> usize {
        self.bytes.lock().unwrap().len()
    }

    fn peek(&self, bytes: &mut [u8]) -> Result<(), MemoryError> {
        bytes.copy_from_slice(&self.bytes.lock().unwrap()[..bytes.len()]);
        Ok(())
    }

    fn take(&self, lease: &WriteLease, copy: PeerCopy) -> Result<u64, MemoryError> {
        let len = copy.num_bytes(self.memory.layout());
        let payload = self.bytes.lock().unwrap()[copy.offset..copy.offset + len].to_vec();
        for (nth, block) in payload.chunks_exact(len / copy.run.num_blocks).enumerate() {
            let at =
                BlockSlice { layer: copy.run.layer, nth: copy.run.first + nth, num_tokens: copy.num_tokens };
            self.memory.scatter(lease, at, block)?;
        }
        Ok(peer_sum(&payload))
    }
}

impl<M: BlockMemory + 'static> BlockMemory for OnDevice<M> {
    fn layout(&self) -> &KvLayout {
        self.memory.layout()
    }

    fn read_blocks(
        &self,
        lease: &ReadLease,
        run: BlockRun,
        order: BlockOrder,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), MemoryError> {
        self.memory.read_blocks(lease, run, order, take)
    }

    fn write(&self, lease: &WriteLease, layer: usize, nth: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        self.memory.write(lease, layer, nth, bytes)
    }

    fn gather(&self, lease: &ReadLease, at: BlockSlice, out: &mut Vec<u8>) -> Result<(), MemoryError> {
        self.memory.gather(lease, at, out)
    }

    fn scatter(&self, lease: &WriteLease, at: BlockSlice, bytes: &[u8]) -> Result<(), MemoryError> {
        self.memory.scatter(lease, at, bytes)
    }

    fn peer(&self) -> Option<&dyn PeerMemory> {
        Some(self)
    }
}
