//! Hashing keys that are hashes or random already.

use std::hash::{BuildHasherDefault, Hasher};

/// Builds the hasher that takes a key's own bytes for its hash.
pub(crate) type Uniform = BuildHasherDefault<UniformHasher>;

/// The first 8 bytes of the key. Block hashes come out of SHA-256 and instance ids out of a random generator, so another hash over
/// them would only cost time. Keys are compared whole: two that begin alike cost a probe more and nothing else.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UniformHasher(u64);

impl Hasher for UniformHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 ^= u64::from_le_bytes(*first);
        }
    }

    /// A derived `Hash` of an array says its length first, which is the same for every key.
    fn write_usize(&mut self, _length: usize) {}
}
