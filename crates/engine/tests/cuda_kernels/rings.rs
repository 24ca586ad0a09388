//! Blocks into a ring and out of it, byte by byte, and the sums of both ends against the definition; and what is committed of their module.

use baton_kv::peer_sum;

use crate::device::{Arg, Device, Launch, device_or_skip, input, number, output};
use crate::support::Random;

/// (block, tokens) of every slice.
type Slices<'a> = &'a [(usize, usize)];

struct Shape {
    num_kv_heads: usize,
    block_size: usize,
    row_bytes: usize,
}

impl Shape {
    const fn block(&self) -> usize {
        2 * self.num_kv_heads * self.block_size * self.row_bytes
    }

    /// The table, and the payload that the blocks give.
    fn payload(&self, layer: &[u8], slices: Slices<'_>) -> (Vec<u32>, Vec<u8>) {
        let (mut table, mut payload) = (Vec::new(), Vec::new());
        for &(block, tokens) in slices {
            table.extend([block as u32, tokens as u32, (payload.len() / 16) as u32]);
            for head in 0..2 * self.num_kv_heads {
                let start = block * self.block() + head * self.block_size * self.row_bytes;
                payload.extend_from_slice(&layer[start..start + tokens * self.row_bytes]);
            }
        }
        (table, payload)
    }

    /// Runs a kernel and returns the sum of what its blocks of threads say.
    fn run(&self, device: &dyn Device, kernel: &str, to: Arg<'_>, from: Arg<'_>, table: &[u32]) -> u64 {
        let grid = [table.len() / 3, 2 * self.num_kv_heads, 1];
        let mut sums = vec![u64::MAX; grid[0] * grid[1]];
        let [heads, size, row] = [self.num_kv_heads, self.block_size, self.row_bytes].map(number);
        let args = [to, output(&mut sums), from, input(table), heads, size, row];
        device.run(&Launch { kernel, grid, threads: 128, shared_bytes: 64 }, &args);
        sums.into_iter().fold(0, u64::wrapping_add)
    }
}

#[test]
fn both_ends_sum_what_they_copy_as_it_is_defined_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    let shapes = [
        Shape { num_kv_heads: 2, block_size: 16, row_bytes: 32 },
        Shape { num_kv_heads: 3, block_size: 32, row_bytes: 192 },
        Shape { num_kv_heads: 1, block_size: 16, row_bytes: 512 },
    ];
    for shape in shapes {
        let mut random = Random(7);
        let layer: Vec<u8> = (0..4 * shape.block()).map(|_| random.next() as u8).collect();
        let slices = [(3, shape.block_size), (0, shape.block_size), (2, 5), (1, 1)];
        let (table, want) = shape.payload(&layer, &slices);
        for schedule in device.schedules() {
            device.set_schedule(schedule);
            let mut ring = vec![0; want.len()];
            let put = shape.run(device, "gather_summed", output(&mut ring), input(&layer), &table);
            assert!(ring == want && put == peer_sum(&want), "schedule {schedule}");
            let mut other = vec![0xee; layer.len()];
            let took = shape.run(device, "scatter_summed", output(&mut other), input(&ring), &table);
            assert_eq!(took, put, "schedule {schedule}");
            let (_, back) = shape.payload(&other, &slices);
            assert!(back == want);
            let untouched = other.len() - want.len();
            let (kept, size) = (|i: usize| other[i] == 0xee, shape.block());
            let beyond = (0..other.len()).filter(|i| {
                let token = i / shape.row_bytes % shape.block_size;
                !slices.iter().any(|&(block, tokens)| i / size == block && token < tokens)
            });
            assert_eq!(beyond.filter(|&i| kept(i)).count(), untouched);
        }
        device.set_schedule(0);
    }
}

#[test]
fn a_byte_that_changed_in_the_ring_changes_the_sum_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    let shape = Shape { num_kv_heads: 2, block_size: 16, row_bytes: 32 };
    let mut random = Random(8);
    let layer: Vec<u8> = (0..2 * shape.block()).map(|_| random.next() as u8).collect();
    let (table, mut ring) = shape.payload(&layer, &[(1, 16), (0, 3)]);
    let good = peer_sum(&ring);
    for _ in 0..20 {
        let (at, bit) = (random.next() as usize % ring.len(), random.next() % 8);
        ring[at] ^= 1 << bit;
        let mut other = vec![0; layer.len()];
        let took = shape.run(device, "scatter_summed", output(&mut other), input(&ring), &table);
        assert!(took != good && took == peer_sum(&ring), "byte {at}");
        ring[at] ^= 1 << bit;
    }
}

/// As the other module's, which `toolchain` looks at.
mod toolchain {
    use std::fs;

    use crate::library::cuda_folder;
    use crate::toolchain::sha256;

    #[test]
    fn the_module_of_rings_was_made_of_these_sources_and_spills_nothing() {
        let built = cuda_folder().join("built/peer");
        let sums = fs::read_to_string(built.join("SHA256SUMS")).unwrap();
        let names = ["kernels/device.cu", "kernels/numbers.cu", "peer/rings.cu", "built/peer/peer.fatbin"];
        let listed: Vec<_> = sums.lines().filter_map(|line| line.split_once("  ")).collect();
        assert_eq!(listed.iter().map(|(_, name)| *name).collect::<Vec<_>>(), names);
        for (sum, name) in listed {
            let got = sha256(&cuda_folder().join(name)).expect("sha256sum");
            assert_eq!(got, sum, "{name} was changed: run crates/engine/cuda/build.py");
        }
        let resources = fs::read_to_string(built.join("resources.txt")).unwrap();
        for line in resources.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, _, "stack", "0", "spills", "0", "registers", registers] = words[..] else {
                panic!("stack, spills or no line of resources: {line}");
            };
            assert!(registers.parse::<u32>().unwrap() <= 64, "{line}: the budget is 64");
        }
        assert_eq!(resources.lines().count(), 2 * 2);
    }
}
