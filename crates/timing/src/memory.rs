//! Simulated block memory: one 64-bit fingerprint in place of each token's K and V in each layer.

/// Fingerprints by (layer, block, slot). A wrong, stale or missing one changes every token that attends over it.
#[derive(Clone, Debug)]
pub struct FingerprintMemory {
    num_blocks: usize,
    block_size: usize,
    slots: Vec<u64>,
}

impl FingerprintMemory {
    /// Bytes of one token in one layer.
    pub const TOKEN_BYTES: usize = 8;

    /// Memory of `num_layers x num_blocks x block_size` empty slots.
    pub fn new(num_layers: usize, num_blocks: usize, block_size: usize) -> Self {
        Self { num_blocks, block_size, slots: vec![0; num_layers * num_blocks * block_size] }
    }

    fn at(&self, layer: usize, block: u32) -> Option<std::ops::Range<usize>> {
        let start = (layer * self.num_blocks + block as usize) * self.block_size;
        let range = start..start + self.block_size;
        ((block as usize) < self.num_blocks && range.end <= self.slots.len()).then_some(range)
    }

    /// All slots of a block in a layer; `None` outside the memory.
    pub fn block(&self, layer: usize, block: u32) -> Option<&[u64]> {
        self.slots.get(self.at(layer, block)?)
    }

    /// All slots of a block in a layer, to be written; `None` outside the memory.
    pub fn block_mut(&mut self, layer: usize, block: u32) -> Option<&mut [u64]> {
        let range = self.at(layer, block)?;
        self.slots.get_mut(range)
    }

    /// The first `num_tokens` slots of a block in a layer as bytes to be sent, [`Self::TOKEN_BYTES`] each; `None` outside the memory.
    pub fn read(&self, layer: usize, block: u32, num_tokens: usize) -> Option<Vec<u8>> {
        let slots = self.block(layer, block)?.get(..num_tokens)?;
        Some(slots.iter().flat_map(|slot| slot.to_le_bytes()).collect())
    }

    /// The reverse of [`Self::read`]. False, and nothing is written, when the bytes are no whole tokens or don't fit.
    pub fn write(&mut self, layer: usize, block: u32, bytes: &[u8]) -> bool {
        let (tokens, rest) = bytes.as_chunks::<8>();
        let Some(slots) = self.block_mut(layer, block).and_then(|slots| slots.get_mut(..tokens.len())) else {
            return false;
        };
        if !rest.is_empty() {
            return false;
        }
        for (slot, token) in slots.iter_mut().zip(tokens) {
            *slot = u64::from_le_bytes(*token);
        }
        true
    }

    /// Copies a whole block in all layers. False outside the memory.
    pub fn copy(&mut self, from: u32, to: u32) -> bool {
        let num_layers = self.slots.len() / (self.num_blocks * self.block_size).max(1);
        (0..num_layers).all(|layer| match (self.at(layer, from), self.at(layer, to)) {
            (Some(from), Some(to)) => {
                self.slots.copy_within(from, to.start);
                true
            }
            _ => false,
        })
    }
}
