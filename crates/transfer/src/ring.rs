//! Where the payloads of one stream lie in shared memory until the destination has read them.

use std::collections::VecDeque;
use std::io;

use crate::shared::SharedMemory;

/// Bytes of a ring. Half of it cost a tenth more CPU time, and so did twice as much.
pub(crate) const RING_BYTES: usize = 4 * 1024 * 1024;

/// Payload that a ring takes at most: with a quarter of it, there is room again whenever the destination has told what it read.
pub(crate) const MAX_SHARED_FRAME_BYTES: usize = RING_BYTES / 4;

/// How far the destination may be with reading before it tells, for memory of `len` bytes.
pub(crate) const fn untold_bytes(len: usize) -> usize {
    len / 4
}

/// Memory that is written round and round; payloads are read, and so make room, in the order in which they were written.
pub(crate) struct Ring {
    memory: SharedMemory,
    room: Room,
}

impl Ring {
    /// An empty ring.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { memory: SharedMemory::new(RING_BYTES)?, room: Room::new(RING_BYTES) })
    }

    /// Forgets a stream whose payloads were all read.
    pub(crate) fn clear(&mut self) {
        self.room = Room::new(RING_BYTES);
    }

    /// Where the destination finds it.
    pub(crate) fn path(&self) -> String {
        self.memory.path()
    }

    /// Whether a payload of `len` bytes has room now.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.room.place(len).is_some()
    }

    /// Takes room for a payload of `len` bytes, and returns its offset.
    pub(crate) fn take(&mut self, len: usize) -> Option<usize> {
        self.room.take(len)
    }

    /// Writes at an offset that was taken, and appends the bytes to `crc`; `None` when they do not fit.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8], crc: u32) -> Option<u32> {
        self.memory.write(offset, bytes, crc)
    }

    /// The destination has read this many payloads since the stream began.
    pub(crate) fn read_up_to(&mut self, num_payloads: u64) {
        self.room.read_up_to(num_payloads);
    }
}

/// Which bytes are taken.
#[derive(Debug)]
pub(crate) struct Room {
    len: usize,
    /// Where the next payload lies, if there is room behind the last one.
    head: usize,
    /// (offset, bytes) of payloads that were not read yet.
    unread: VecDeque<(usize, usize)>,
    num_read: u64,
}

impl Room {
    pub(crate) const fn new(len: usize) -> Self {
        Self { len, head: 0, unread: VecDeque::new(), num_read: 0 }
    }

    pub(crate) fn place(&self, len: usize) -> Option<usize> {
        let Some(&(tail, _)) = self.unread.front() else {
            // The beginning is what the caches still have.
            return (len <= self.len).then_some(0);
        };
        if self.head <= tail {
            return (self.head + len <= tail).then_some(self.head);
        }
        if self.head + len <= self.len {
            return Some(self.head);
        }
        (len <= tail).then_some(0)
    }

    pub(crate) fn take(&mut self, len: usize) -> Option<usize> {
        let offset = self.place(len)?;
        self.head = offset + len;
        self.unread.push_back((offset, len));
        Some(offset)
    }

    pub(crate) fn read_up_to(&mut self, num_payloads: u64) {
        while self.num_read < num_payloads && self.unread.pop_front().is_some() {
            self.num_read += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// splitmix64.
    struct Rng(u64);

    impl Rng {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) % n as u64) as usize
        }
    }

    #[test]
    fn what_is_unread_is_never_given_away_and_there_is_room_in_time() {
        for seed in 0..200 {
            let rng = &mut Rng(seed);
            let len = (1 + rng.below(64)) * 4096;
            let mut room = Room::new(len);
            let (mut taken, mut num_read, mut untold): (VecDeque<(usize, usize)>, u64, usize) =
                (VecDeque::new(), 0, 0);
            for _ in 0..2000 {
                let payload = 1 + rng.below(len / 4);
                // The destination reads whatever is there, but tells only now and then.
                if rng.below(3) == 0 || untold >= untold_bytes(len) {
                    room.read_up_to(num_read);
                    untold = 0;
                }
                match room.take(payload) {
                    Some(at) => {
                        assert!(at + payload <= len, "seed {seed}");
                        for &(start, bytes) in &taken {
                            assert!(at + payload <= start || start + bytes <= at, "seed {seed}: overlap");
                        }
                        taken.push_back((at, payload));
                    }
                    None => assert!(!room.unread.is_empty(), "seed {seed}: empty, and no room for {payload}"),
                }
                while taken.len() > rng.below(4) {
                    let (_, bytes) = taken.pop_front().unwrap();
                    num_read += 1;
                    untold += bytes;
                }
            }
        }
    }

    #[test]
    fn a_reader_that_tells_every_quarter_never_stops_the_writer() {
        for seed in 0..200 {
            let rng = &mut Rng(seed);
            let len = (4 + rng.below(64)) * 4096;
            let mut room = Room::new(len);
            let (mut num_read, mut untold) = (0, 0);
            for _ in 0..1000 {
                let payload = 1 + rng.below(len / 4);
                assert!(
                    room.take(payload).is_some(),
                    "seed {seed}: no room for {payload} of {len}: {room:?}"
                );
                num_read += 1;
                untold += payload;
                if untold >= untold_bytes(len) {
                    room.read_up_to(num_read);
                    untold = 0;
                }
            }
        }
    }

    #[test]
    fn a_reader_that_claims_too_much_is_not_believed() {
        let mut room = Room::new(4096);
        assert_eq!((room.take(1000), room.take(1000)), (Some(0), Some(1000)));
        room.read_up_to(u64::MAX);
        assert_eq!((room.num_read, room.take(4096)), (2, Some(0)));
        room.read_up_to(2);
        assert_eq!(room.unread.len(), 1);
    }
}
