//! The bulk receiver of a handoff: the only one who writes into reserved blocks.

use baton_handoff::Time;
use baton_kv::WriteLease;
use baton_timing::FingerprintMemory;

use crate::frames::{Cut, Frame};

/// Writes verified frames through its lease.
pub(crate) struct Receiver {
    lease: WriteLease,
    cut: Cut,
    have: Vec<bool>,
    /// Frames verified without a gap.
    num_contiguous: usize,
    fenced_at: Option<Time>,
}

/// What became of a frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// Written; every byte below this offset is verified.
    Verified(u64),
    /// Written beyond a gap, or known already, or not ours to write any more.
    Nothing,
    /// Its checksum is wrong.
    Damaged,
    /// It is no frame of this handoff.
    Foreign,
}

impl Receiver {
    pub(crate) fn new(lease: WriteLease, cut: Cut) -> Self {
        let have = vec![false; cut.num_frames() as usize];
        Self { lease, cut, have, num_contiguous: 0, fenced_at: None }
    }

    pub(crate) fn fence(&mut self, now: Time) {
        self.lease.fence().close();
        self.fenced_at = Some(now);
    }

    pub(crate) const fn fenced_at(&self) -> Option<Time> {
        self.fenced_at
    }

    pub(crate) fn take(&mut self, frame: &Frame, memory: &mut FingerprintMemory) -> Received {
        if self.lease.is_fenced() {
            return Received::Nothing;
        }
        if !frame.is_whole() {
            return Received::Damaged;
        }
        let Some(place) = self.cut.place(frame.index) else { return Received::Foreign };
        let Some(block) = self.lease.block(place.block) else { return Received::Foreign };
        let fits = frame.payload.len() == place.num_tokens * FingerprintMemory::TOKEN_BYTES;
        let written = self.cut.empty || (fits && memory.write(place.layer, block, &frame.payload));
        if !written {
            return Received::Foreign;
        }
        if let Some(have) = self.have.get_mut(frame.index as usize) {
            *have = true;
        }
        let before = self.num_contiguous;
        while self.have.get(self.num_contiguous) == Some(&true) {
            self.num_contiguous += 1;
        }
        if self.num_contiguous == before {
            return Received::Nothing;
        }
        let last = self.cut.range(self.num_contiguous as u64 - 1);
        Received::Verified(last.map_or(0, |range| range.end))
    }
}
