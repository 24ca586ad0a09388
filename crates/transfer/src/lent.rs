//! What one stream has to put payloads into instead of into its messages.

use baton_proto::v1;

use crate::Transport;
use crate::bulk::LentShared;
use crate::device::LentRing;
use crate::frames::Frame;
use crate::outgoing::Blocks;

/// A ring of either kind. Dropped, it is given to no other stream before the destination is certain to be done with it.
pub(crate) enum Lent {
    /// In memory that both processes map.
    Shared(LentShared),
    /// In the memory of this worker's device.
    Device(LentRing),
}

impl Lent {
    /// Where its payloads lie.
    pub(crate) const fn transport(&self) -> Transport {
        match self {
            Self::Shared(_) => Transport::Shm,
            Self::Device(_) => Transport::Ipc,
        }
    }

    /// What the first message of a stream says of it.
    pub(crate) fn opening(&self) -> v1::KvFrame {
        match self {
            Self::Shared(lent) => v1::KvFrame { shared_path: lent.ring.path(), ..v1::KvFrame::default() },
            Self::Device(lent) => v1::KvFrame { device_ring: lent.handle().into(), ..v1::KvFrame::default() },
        }
    }

    /// Whether a payload of `len` bytes has room now.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        match self {
            Self::Shared(lent) => lent.ring.has_room(len),
            Self::Device(lent) => lent.room.place(len).is_some(),
        }
    }

    /// Copies a frame's payload into it; its offset, and the frame's sum. When it returns, the bytes are there.
    ///
    /// # Errors
    /// Why not, for people.
    pub(crate) fn put(&mut self, blocks: &Blocks, frame: &Frame) -> Result<(usize, u32), String> {
        let full = || "the ring is full".to_owned();
        match self {
            Self::Shared(lent) => {
                let ring = &mut lent.ring;
                let offset = ring.take(frame.len as usize).ok_or_else(full)?;
                let (mut end, mut fits) = (offset, true);
                let read = blocks.read(frame, &mut Vec::new(), |crc, bytes| {
                    let written = ring.write(end, bytes, crc);
                    fits &= written.is_some();
                    end += bytes.len();
                    written.unwrap_or(crc)
                });
                let crc = read.map_err(|error| error.to_string())?;
                if !fits {
                    return Err("it does not fit into the ring".to_owned());
                }
                Ok((offset, crc))
            }
            Self::Device(lent) => {
                let offset = lent.room.take(frame.len as usize).ok_or_else(full)?;
                Ok((offset, lent.put(blocks, frame, offset)?))
            }
        }
    }

    /// The destination has read this many payloads since the stream began.
    pub(crate) fn read_up_to(&mut self, num_payloads: u64) {
        match self {
            Self::Shared(lent) => lent.ring.read_up_to(num_payloads),
            Self::Device(lent) => lent.room.read_up_to(num_payloads),
        }
    }

    /// Keeps it for another stream: the destination has read all that lies in it.
    pub(crate) fn give_back(self) {
        match self {
            Self::Shared(lent) => lent.give_back(),
            Self::Device(lent) => lent.give_back(),
        }
    }
}
