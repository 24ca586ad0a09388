//! How block memory on a device is reached from another process of the same host, without a copy through the host's memory.
//!
//! The source makes a *ring* in its device's memory and copies blocks into it; the destination opens the ring and copies from it into
//! its own blocks. So nobody but its own process ever writes into an arena.

use crate::{BlockRun, KvLayout, MemoryError, ReadLease, WriteLease};

/// What an arena on a device offers beside [`crate::BlockMemory`].
pub trait PeerMemory: Send + Sync {
    /// Makes a ring of `len` bytes.
    ///
    /// # Errors
    /// [`MemoryError::Device`]: no memory, or a device whose memory others can't open.
    fn make_ring(&self, len: usize) -> Result<Box<dyn PeerRing>, MemoryError>;

    /// Opens a ring of `len` bytes that another process of this host made. Dropped, it is closed.
    ///
    /// # Errors
    /// [`MemoryError::Device`]: a handle that is none, or a device that this one can't reach.
    fn open_ring(&self, handle: &[u8], len: usize) -> Result<Box<dyn PeerView>, MemoryError>;
}

/// Some blocks of one layer, and their bytes' place in a ring: one block after another, each in canonical order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCopy {
    /// The blocks.
    pub run: BlockRun,
    /// Of each block its first tokens: the block size, or fewer of a prompt's last block.
    pub num_tokens: usize,
    /// First byte in the ring; a multiple of 16.
    pub offset: usize,
}

impl PeerCopy {
    /// Bytes that are copied.
    pub const fn num_bytes(&self, layout: &KvLayout) -> usize {
        self.run.num_blocks * (layout.block_layer_bytes() / layout.block_size) * self.num_tokens
    }
}

/// The source's end. It is freed when it is dropped, wherever it is still open.
pub trait PeerRing: Send + Sync {
    /// By which another process opens it.
    fn handle(&self) -> &[u8];

    /// Writes a few bytes at its beginning.
    ///
    /// # Errors
    /// [`MemoryError::Device`].
    fn mark(&self, bytes: &[u8]) -> Result<(), MemoryError>;

    /// Copies blocks into it and returns their [`peer_sum`]; when it returns, the bytes are there. The caller copies only what the step
    /// loop has announced as complete.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`], also for a place beyond the ring; [`MemoryError::Device`].
    fn put(&self, lease: &ReadLease, copy: PeerCopy) -> Result<u64, MemoryError>;
}

/// The destination's end.
pub trait PeerView: Send + Sync {
    /// Bytes.
    fn num_bytes(&self) -> usize;

    /// Reads a few bytes from its beginning.
    ///
    /// # Errors
    /// [`MemoryError::Device`].
    fn peek(&self, bytes: &mut [u8]) -> Result<(), MemoryError>;

    /// Copies from it into blocks and returns the [`peer_sum`] of what was written; when it returns, nothing is read from the ring any more.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing was written then, except by a device that failed.
    fn take(&self, lease: &WriteLease, copy: PeerCopy) -> Result<u64, MemoryError>;
}

/// What the device sums while it copies: each little-endian 32-bit word times a weight of its place, modulo 2^64 (multilinear hashing: Lemire and
/// Kaser, 2014), weights by splitmix64 (Steele, Lea and Flood, 2014). Any one wrong word changes it; so do words that changed places,
/// but for one chance in about 2^32. The length is a multiple of 4.
pub fn peer_sum(payload: &[u8]) -> u64 {
    let (words, _) = payload.as_chunks::<4>();
    let weighed = words
        .iter()
        .zip(0u64..)
        .map(|(word, place)| u64::from(u32::from_le_bytes(*word)).wrapping_mul(weight(place)));
    weighed.fold(0, u64::wrapping_add)
}

/// Of the word at this place; never 0 for a payload that fits a ring.
const fn weight(place: u64) -> u64 {
    let z = place.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_splitmix64() {
        // The first numbers of the generator's reference, seed 0.
        assert_eq!(weight(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(weight(1), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(weight(2), 0x06C4_5D18_8009_454F);
    }

    #[test]
    fn every_flipped_bit_and_every_pair_of_swapped_words_changes_the_sum() {
        let payload: Vec<u8> = (0..512u32).flat_map(|n| n.wrapping_mul(0x9E37_79B9).to_le_bytes()).collect();
        let sum = peer_sum(&payload);
        for bit in 0..payload.len() * 8 {
            let mut other = payload.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(peer_sum(&other), sum, "bit {bit}");
        }
        for first in 0..512 {
            for second in 0..first {
                let mut other = payload.clone();
                for byte in 0..4 {
                    other.swap(4 * first + byte, 4 * second + byte);
                }
                assert_ne!(peer_sum(&other), sum, "words {second} and {first}");
            }
        }
    }

    #[test]
    fn two_flips_of_the_highest_bits_are_seen_too() {
        // Where weights modulo a power of two alone decide, high bits are the weak ones.
        let payload = vec![0u8; 4 * 512];
        for first in 0..512 {
            for second in 0..first {
                let mut other = payload.clone();
                other[4 * first + 3] ^= 0x80;
                other[4 * second + 3] ^= 0x80;
                assert_ne!(peer_sum(&other), 0, "words {second} and {first}");
            }
        }
    }
}
