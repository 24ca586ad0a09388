//! Copies of blocks, and between blocks and canonical order, byte by byte.

use crate::device::{Launch, device_or_skip, input, number, output};
use crate::support::Random;

fn bytes(seed: u64, n: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..n).map(|_| random.next() as u8).collect()
}

#[test]
fn blocks_are_copied_in_every_layer_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    let (num_blocks, num_layers, len) = (5, 3, 2 * 3 * 16 * 96 * 2);
    let before = bytes(1, num_layers * num_blocks * len);
    let (mut arena, pairs) = (before.clone(), [0u32, 3, 4, 1]);
    let args = [output(&mut arena), input(&pairs), number(num_blocks), number(len)];
    let launch = Launch { kernel: "copy_blocks", grid: [2, num_layers, 1], threads: 256, shared_bytes: 0 };
    device.run(&launch, &args);
    for layer in 0..num_layers {
        for (block, from) in [(0, 0), (1, 4), (2, 2), (3, 0), (4, 4)] {
            let place =
                |block: usize| (layer * num_blocks + block) * len..(layer * num_blocks + block + 1) * len;
            assert!(arena[place(block)] == before[place(from)], "layer {layer}, block {block}");
        }
    }
}

#[test]
fn slices_are_gathered_and_scattered_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for (num_kv_heads, block_size, row_bytes) in [(2usize, 16usize, 32usize), (3, 32, 192)] {
        let block = 2 * num_kv_heads * block_size * row_bytes;
        let layer = bytes(2, 4 * block);
        // Of block 3 its first 5 tokens, all of block 0, one token of block 2.
        let slices = [(3, 5), (0, block_size), (2, 1)];
        let (mut table, mut want) = (Vec::new(), Vec::new());
        for (b, tokens) in slices {
            table.extend([b as u32, tokens as u32, (want.len() / 16) as u32]);
            for head in 0..2 * num_kv_heads {
                let start = b * block + head * block_size * row_bytes;
                want.extend_from_slice(&layer[start..start + tokens * row_bytes]);
            }
        }
        let mut staging = vec![0; want.len()];
        let geometry = || [num_kv_heads, block_size, row_bytes].map(number);
        let launch = |kernel| Launch {
            kernel,
            grid: [slices.len(), 2 * num_kv_heads, 1],
            threads: 128,
            shared_bytes: 0,
        };
        let [heads, size, row] = geometry();
        let args = [output(&mut staging), input(&layer), input(&table), heads, size, row];
        device.run(&launch("gather_blocks"), &args);
        assert!(staging == want);
        let mut other = vec![0xee; layer.len()];
        let [heads, size, row] = geometry();
        device.run(
            &launch("scatter_blocks"),
            &[output(&mut other), input(&staging), input(&table), heads, size, row],
        );
        for (i, (&got, &from)) in other.iter().zip(&layer).enumerate() {
            let (b, token) = (i / block, i / row_bytes % block_size);
            let sent = slices.iter().any(|&(block, tokens)| b == block && token < tokens);
            assert_eq!(got, if sent { from } else { 0xee }, "byte {i}");
        }
    }
}
