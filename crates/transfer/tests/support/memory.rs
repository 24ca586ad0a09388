//! Block memory in plain vectors: one side only reads, the other only writes.

use std::sync::Mutex;

use baton_kv::{BlockMemory, BlockOrder, BlockRun, BlockSlice, KvLayout, MemoryError, ReadLease, WriteLease};

use super::Rng;

/// Blocks that are read. Raw blocks are in canonical order: [K|V][kv head][token][dim].
pub(crate) struct Source {
    pub(crate) layout: KvLayout,
    num_blocks: usize,
    pub(crate) bytes: Vec<u8>,
}

/// Blocks that are written.
pub(crate) struct Sink {
    pub(crate) layout: KvLayout,
    num_blocks: usize,
    bytes: Mutex<Vec<u8>>,
}

fn start(layout: &KvLayout, num_blocks: usize, layer: usize, block: u32) -> usize {
    (layer * num_blocks + block as usize) * layout.block_layer_bytes()
}

/// (offset in the block, offset in the gathered tokens, length) of every run of the first `num_tokens` tokens.
fn runs(layout: &KvLayout, num_tokens: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let row = layout.head_dim * layout.dtype.size();
    let block_size = layout.block_size;
    (0..2 * layout.num_kv_heads).map(move |i| (i * block_size * row, i * num_tokens * row, num_tokens * row))
}

fn out_of_range(layer: usize, nth: usize, num_blocks: usize) -> MemoryError {
    MemoryError::OutOfRange { layer, nth, num_blocks }
}

impl Source {
    pub(crate) fn random(layout: &KvLayout, num_blocks: usize, rng: &mut Rng) -> Self {
        let bytes = (0..layout.block_bytes() * num_blocks).map(|_| rng.next() as u8).collect();
        Self { layout: layout.clone(), num_blocks, bytes }
    }

    pub(crate) fn block(&self, layer: usize, block: u32) -> &[u8] {
        let at = start(&self.layout, self.num_blocks, layer, block);
        &self.bytes[at..at + self.layout.block_layer_bytes()]
    }
}

impl BlockMemory for Source {
    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Its own order is the canonical one.
    fn read_blocks(
        &self,
        lease: &ReadLease,
        run: BlockRun,
        _: BlockOrder,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), MemoryError> {
        for nth in run.first..run.first + run.num_blocks {
            let block = lease.block(nth).ok_or(out_of_range(run.layer, nth, lease.len()))?;
            take(self.block(run.layer, block));
        }
        Ok(())
    }

    fn write(&self, _: &WriteLease, _: usize, _: usize, _: &[u8]) -> Result<(), MemoryError> {
        unreachable!("the source only reads")
    }

    fn gather(&self, lease: &ReadLease, at: BlockSlice, out: &mut Vec<u8>) -> Result<(), MemoryError> {
        let block = lease.block(at.nth).ok_or(out_of_range(at.layer, at.nth, lease.len()))?;
        let block = self.block(at.layer, block);
        for (from, _, len) in runs(&self.layout, at.num_tokens) {
            out.extend_from_slice(&block[from..from + len]);
        }
        Ok(())
    }

    fn scatter(&self, _: &WriteLease, _: BlockSlice, _: &[u8]) -> Result<(), MemoryError> {
        unreachable!("the source only reads")
    }
}

impl Sink {
    pub(crate) fn new(layout: &KvLayout, num_blocks: usize) -> Self {
        let bytes = Mutex::new(vec![0; layout.block_bytes() * num_blocks]);
        Self { layout: layout.clone(), num_blocks, bytes }
    }

    pub(crate) fn block(&self, layer: usize, block: u32) -> Vec<u8> {
        let at = start(&self.layout, self.num_blocks, layer, block);
        self.bytes.lock().unwrap()[at..at + self.layout.block_layer_bytes()].to_vec()
    }

    pub(crate) fn snapshot(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    fn place(&self, lease: &WriteLease, layer: usize, nth: usize) -> Result<usize, MemoryError> {
        if lease.is_fenced() {
            return Err(MemoryError::Fenced);
        }
        let block = lease.block(nth).ok_or(out_of_range(layer, nth, lease.len()))?;
        Ok(start(&self.layout, self.num_blocks, layer, block))
    }
}

impl BlockMemory for Sink {
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
        unreachable!("the sink only writes")
    }

    fn write(&self, lease: &WriteLease, layer: usize, nth: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let at = self.place(lease, layer, nth)?;
        self.bytes.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn gather(&self, _: &ReadLease, _: BlockSlice, _: &mut Vec<u8>) -> Result<(), MemoryError> {
        unreachable!("the sink only writes")
    }

    fn scatter(&self, lease: &WriteLease, at: BlockSlice, bytes: &[u8]) -> Result<(), MemoryError> {
        let start = self.place(lease, at.layer, at.nth)?;
        let mut all = self.bytes.lock().unwrap();
        for (to, from, len) in runs(&self.layout, at.num_tokens) {
            all[start + to..start + to + len].copy_from_slice(&bytes[from..from + len]);
        }
        Ok(())
    }
}

/// Every (layer, token) of the span equal on both sides; tokens beyond it untouched.
pub(crate) fn assert_same(source: (&Source, &[u32]), sink: (&Sink, &[u32]), span: baton_transfer::TokenSpan) {
    let layout = &source.0.layout;
    for layer in 0..layout.num_layers {
        for nth in 0..layout.blocks_for(span.prompt_tokens) {
            let (ours, theirs) = (source.0.block(layer, source.1[nth]), sink.0.block(layer, sink.1[nth]));
            if (nth + 1) * layout.block_size <= span.skip_tokens {
                assert!(theirs.iter().all(|&b| b == 0), "skipped block {nth} was written");
                continue;
            }
            let filled = layout.block_size.min(span.prompt_tokens - nth * layout.block_size);
            let mut wanted = vec![0; ours.len()];
            for (at, _, len) in runs(layout, filled) {
                wanted[at..at + len].copy_from_slice(&ours[at..at + len]);
            }
            assert!(theirs == wanted, "layer {layer}, block {nth} differs");
        }
    }
}
