//! Rings are bounded and rest when they must; views are kept for the next stream and not for ever.

use std::sync::atomic::AtomicUsize;

use baton_kv::{BlockOrder, BlockRun, BlockSlice, KvDtype, KvLayout, ReadLease};

use super::*;

/// A device that counts what is open, and has memory for `max_rings`.
struct Counting {
    layout: KvLayout,
    num_rings: AtomicUsize,
    max_rings: usize,
    num_open: Arc<AtomicUsize>,
}

struct Numbered(Vec<u8>);

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn nowhere<T>() -> Result<T, MemoryError> {
    Err(MemoryError::Device("nothing is there".to_owned()))
}

impl PeerRing for Numbered {
    fn handle(&self) -> &[u8] {
        &self.0
    }

    fn mark(&self, _: &[u8]) -> Result<(), MemoryError> {
        Ok(())
    }

    fn put(&self, _: &ReadLease, _: PeerCopy) -> Result<u64, MemoryError> {
        nowhere()
    }
}

impl PeerView for Open {
    fn num_bytes(&self) -> usize {
        DEVICE_RING_BYTES
    }

    fn peek(&self, _: &mut [u8]) -> Result<(), MemoryError> {
        Ok(())
    }

    fn take(&self, _: &WriteLease, _: PeerCopy) -> Result<u64, MemoryError> {
        nowhere()
    }
}

impl PeerMemory for Counting {
    fn make_ring(&self, len: usize) -> Result<Box<dyn PeerRing>, MemoryError> {
        assert_eq!(len, DEVICE_RING_BYTES);
        let nth = self.num_rings.fetch_add(1, Ordering::SeqCst);
        if nth >= self.max_rings {
            return Err(MemoryError::Device("out of memory".to_owned()));
        }
        Ok(Box::new(Numbered(vec![nth as u8])))
    }

    fn open_ring(&self, _: &[u8], _: usize) -> Result<Box<dyn PeerView>, MemoryError> {
        self.num_open.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Open(Arc::clone(&self.num_open))))
    }
}

impl BlockMemory for Counting {
    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn read_blocks(
        &self,
        _: &ReadLease,
        _: BlockRun,
        _: BlockOrder,
        _: &mut dyn FnMut(&[u8]),
    ) -> Result<(), MemoryError> {
        nowhere()
    }

    fn write(&self, _: &WriteLease, _: usize, _: usize, _: &[u8]) -> Result<(), MemoryError> {
        nowhere()
    }

    fn gather(&self, _: &ReadLease, _: BlockSlice, _: &mut Vec<u8>) -> Result<(), MemoryError> {
        nowhere()
    }

    fn scatter(&self, _: &WriteLease, _: BlockSlice, _: &[u8]) -> Result<(), MemoryError> {
        nowhere()
    }

    fn peer(&self) -> Option<&dyn PeerMemory> {
        Some(self)
    }
}

fn device(max_rings: usize) -> Arc<Counting> {
    let layout = KvLayout {
        model_digest: [0; 32],
        num_layers: 1,
        num_kv_heads: 1,
        head_dim: 64,
        block_size: 16,
        dtype: KvDtype::F16,
        arrangement: String::new(),
        numerics_id: String::new(),
    };
    Arc::new(Counting { layout, num_rings: AtomicUsize::new(0), max_rings, num_open: Arc::default() })
}

#[test]
fn rings_are_bounded_kept_when_read_and_rest_when_not() {
    let rings = DeviceRings::new(device(99)).unwrap();
    let mut lent: Vec<_> = (0..MAX_DEVICE_RINGS).map(|_| rings.lend().unwrap().unwrap()).collect();
    assert!(rings.lend().unwrap().is_none(), "a stream beyond the bound goes another way");
    let mut kept = lent.pop().unwrap();
    let handle = kept.handle();
    assert_eq!((kept.room.take(1000), kept.room.take(1000)), (Some(0), Some(1000)));
    kept.give_back();
    let mut again = rings.lend().unwrap().unwrap();
    assert_eq!((again.handle(), again.room.take(1000)), (handle.clone(), Some(0)), "the same, and empty");
    // Its stream ends early: the destination may be reading it still.
    drop(again);
    let now = Instant::now();
    assert!(rings.lend_at(now + REST / 2).unwrap().is_none(), "a ring that rests was lent");
    assert_eq!(rings.lend_at(now + REST).unwrap().unwrap().handle(), handle);
}

#[test]
fn a_device_without_memory_closes_the_way_and_says_so_once() {
    let rings = DeviceRings::new(device(1)).unwrap();
    let way = DeviceWay::new(Arc::clone(&rings));
    assert!(way.lend(DEVICE_RING_BYTES / 4 + 1).is_none() && way.is_open(), "a frame that is too large");
    let first = way.lend(1000).unwrap();
    assert!(way.lend(1000).is_none() && !way.is_open());
    assert_eq!(rings.state().num_made, 1, "what could not be made does not count");
    first.give_back();
    assert!(way.lend(1000).is_none());
    // The ring is another peer's to use.
    assert!(DeviceWay::new(rings).lend(1000).is_some());
}

#[test]
fn a_view_is_kept_for_the_next_stream_and_closed_when_nobody_came() {
    let (device, views) = (device(0), DeviceViews::default());
    let open = || device.num_open.load(Ordering::SeqCst);
    let start = Instant::now();
    views.keep_at(start, views.open(&*device, &[1]).unwrap());
    let again = views.open(&*device, &[1]).unwrap();
    assert_eq!(open(), 1, "the same view");
    drop(again);
    assert_eq!(open(), 0, "a stream that was cut short closes it");
    views.keep_at(start, views.open(&*device, &[1]).unwrap());
    views.keep_at(start + IDLE_VIEW / 2, views.open(&*device, &[2]).unwrap());
    assert_eq!(open(), 2);
    views.keep_at(start + IDLE_VIEW, views.open(&*device, &[3]).unwrap());
    assert_eq!(open(), 2, "the first was idle for too long");
    for nth in 0..MAX_IDLE_VIEWS as u8 + 9 {
        let view = views.open(&*device, &[100, nth]).unwrap();
        views.keep_at(start + IDLE_VIEW, view);
    }
    assert_eq!(open(), MAX_IDLE_VIEWS);
    drop(views);
    assert_eq!(open(), 0);
}
