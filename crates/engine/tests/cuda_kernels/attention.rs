//! Paged attention against f64, and the same bits whoever computes a row: decode, prefill, another chunk, another block table, another schedule.

use crate::device::{Arg, Device, Launch, device_or_skip, input, number, output};
use crate::element::{Element, POISON, largest_error};
use crate::support::Random;

/// Positions of a tile of split KV, and packed queries of a prefill block, as `ABI.md` fixes them.
const TILE: usize = 128;
const QUERIES: usize = 64;

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) num_tokens: usize,
    pub(crate) position: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) element: Element,
    pub(crate) head_dim: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) block_size: usize,
    pub(crate) rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Decode,
    Prefill,
}

/// Inputs of a case as a kernel takes them.
pub(crate) struct Laid {
    q: Vec<u16>,
    layer: Vec<u16>,
    blocks: Vec<u32>,
    /// K and V of each row, `[kv head][token][dim]`.
    k: Vec<Vec<u16>>,
    v: Vec<Vec<u16>>,
}

impl Case {
    fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    fn kernel(&self, kind: &str) -> String {
        format!("attend_{kind}_{}_d{}", self.element.name(), self.head_dim)
    }

    /// Two roundings to 16 bits: of softmax's weights, and of the result. All values are at most 1.
    pub(crate) fn bound(&self) -> f64 {
        2.0 * self.element.unit() + 1e-5
    }

    /// Numbers by `seed`; where blocks lie by `placement`. Memory that no token has is NaN.
    pub(crate) fn lay(&self, seed: u64, placement: u64) -> Laid {
        let mut random = Random(seed);
        let mut numbers = |n: usize, scale: f32| -> Vec<u16> {
            (0..n).map(|_| self.element.round(random.signed() * scale)).collect()
        };
        let tokens: usize = self.rows.iter().map(|row| row.num_tokens).sum();
        let per_row = |row: &Row| (row.position + row.num_tokens) * self.num_kv_heads * self.head_dim;
        // Scores deviate by 1.6, so that softmax is neither flat nor one-hot.
        let spread = 2.2;
        let q = numbers(tokens * self.num_heads * self.head_dim, spread);
        let k: Vec<_> = self.rows.iter().map(|row| numbers(per_row(row), spread)).collect();
        let v: Vec<_> = self.rows.iter().map(|row| numbers(per_row(row), 1.0)).collect();
        let used: usize =
            self.rows.iter().map(|row| (row.position + row.num_tokens).div_ceil(self.block_size)).sum();
        let mut free: Vec<u32> = (0..used as u32 + 3).collect();
        Random(placement).shuffle(&mut free);
        let half = self.num_kv_heads * self.block_size * self.head_dim;
        let mut layer = vec![POISON; free.len() * 2 * half];
        for ((row, k), v) in self.rows.iter().zip(&k).zip(&v) {
            let len = row.position + row.num_tokens;
            let table = free.len() - used + self.blocks_before(row);
            for head in 0..self.num_kv_heads {
                for token in 0..len {
                    let block = free[table + token / self.block_size] as usize;
                    let to =
                        block * 2 * half + (head * self.block_size + token % self.block_size) * self.head_dim;
                    let from = (head * len + token) * self.head_dim;
                    layer[to..to + self.head_dim].copy_from_slice(&k[from..from + self.head_dim]);
                    layer[to + half..to + half + self.head_dim]
                        .copy_from_slice(&v[from..from + self.head_dim]);
                }
            }
        }
        Laid { q, layer, blocks: free[3..].to_vec(), k, v }
    }

    fn blocks_before(&self, row: &Row) -> usize {
        let before = self.rows.iter().take_while(|other| !std::ptr::eq(*other, row));
        before.map(|row| (row.position + row.num_tokens).div_ceil(self.block_size)).sum()
    }

    /// The tables `rows` and `items`. A padding row and a padding item end them.
    fn tables(&self, kind: Kind) -> (Vec<u32>, Vec<u32>) {
        let (mut rows, mut items) = (Vec::new(), Vec::new());
        let mut token = 0;
        for (n, row) in self.rows.iter().enumerate() {
            let parts = match kind {
                Kind::Decode => (row.position + row.num_tokens).div_ceil(TILE),
                Kind::Prefill => (row.num_tokens * self.group()).div_ceil(QUERIES),
            };
            let first = if kind == Kind::Decode { items.len() / 2 } else { 0 };
            rows.extend(
                [token, row.num_tokens, row.position, self.blocks_before(row), first].map(|x| x as u32),
            );
            items.extend((0..parts).flat_map(|part| [n as u32, part as u32]));
            token += row.num_tokens;
        }
        rows.extend([0; 5]);
        items.extend([u32::MAX, 0]);
        (rows, items)
    }

    /// The kernel's output, `[token][head][dim]`.
    pub(crate) fn run(&self, device: &dyn Device, kind: Kind, laid: &Laid) -> Vec<u16> {
        let (rows, items) = self.tables(kind);
        let mut out = vec![POISON; laid.q.len()];
        let scale = Arg::F32((self.head_dim as f32).powf(-0.5));
        let [heads, kv_heads, block_size, dim] =
            [self.num_heads, self.num_kv_heads, self.block_size, self.head_dim].map(number);
        let (q, layer, table) = (input(&laid.q), input(&laid.layer), input(&laid.blocks));
        let grid = [items.len() / 2, self.num_kv_heads, 1];
        if kind == Kind::Prefill {
            let shared_bytes = 512 * self.head_dim + 2048;
            let launch = Launch { kernel: &self.kernel("prefill"), grid, threads: 128, shared_bytes };
            let args = [
                output(&mut out),
                q,
                layer,
                input(&rows),
                input(&items),
                table,
                heads,
                kv_heads,
                block_size,
                scale,
            ];
            device.run(&launch, &args);
            return out;
        }
        let capacity = self.rows.iter().map(|row| row.num_tokens * self.group()).max().unwrap();
        let mut partials =
            vec![f32::NAN; items.len() / 2 * self.num_kv_heads * capacity * (self.head_dim + 2)];
        let shared_bytes = 512 * self.head_dim + 4096;
        let launch = Launch { kernel: &self.kernel("decode"), grid, threads: 128, shared_bytes };
        let args = [
            output(&mut partials),
            q,
            layer,
            input(&rows),
            input(&items),
            table,
            heads,
            kv_heads,
            block_size,
            number(capacity),
            scale,
        ];
        device.run(&launch, &args);
        let kernel = format!("attend_combine_{}", self.element.name());
        let grid = [rows.len() / 5, self.num_kv_heads, capacity];
        let launch = Launch { kernel: &kernel, grid, threads: 128, shared_bytes: 0 };
        let [heads, kv_heads] = [self.num_heads, self.num_kv_heads].map(number);
        let args = [output(&mut out), input(&partials), input(&rows), heads, kv_heads, dim, number(capacity)];
        device.run(&launch, &args);
        out
    }

    /// Softmax attention in f64.
    pub(crate) fn reference(&self, laid: &Laid) -> Vec<f64> {
        let (e, dim) = (self.element, self.head_dim);
        let mut out = Vec::with_capacity(laid.q.len());
        let mut token = 0;
        for (n, row) in self.rows.iter().enumerate() {
            let len = row.position + row.num_tokens;
            for i in 0..row.num_tokens {
                for head in 0..self.num_heads {
                    let q = &laid.q[((token + i) * self.num_heads + head) * dim..][..dim];
                    let of = |x: &[u16], t: usize, d: usize| {
                        e.widen(x[((head / self.group()) * len + t) * dim + d])
                    };
                    let scores: Vec<f64> = (0..=row.position + i)
                        .map(|t| {
                            (0..dim).map(|d| e.widen(q[d]) * of(&laid.k[n], t, d)).sum::<f64>()
                                / (dim as f64).sqrt()
                        })
                        .collect();
                    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    out.extend((0..dim).map(|d| {
                        weights.iter().enumerate().map(|(t, w)| w * of(&laid.v[n], t, d)).sum::<f64>() / total
                    }));
                }
            }
            token += row.num_tokens;
        }
        out
    }

    /// Whether the kernel agrees with the reference, or how it does not.
    pub(crate) fn check(&self, device: &dyn Device, kind: Kind, laid: &Laid) -> Result<(), String> {
        let got = self.run(device, kind, laid);
        let error =
            largest_error(got.iter().map(|&x| self.element.widen(x)), self.reference(laid).into_iter());
        eprintln!("{kind:?} {} heads of {}: off by {error:.1e}", self.element.name(), self.head_dim);
        if error <= self.bound() { Ok(()) } else { Err(format!("{self:?}, {kind:?}: off by {error}")) }
    }

    /// Whether every schedule gives the bits of the first.
    pub(crate) fn check_schedules(&self, device: &dyn Device, kind: Kind, laid: &Laid) -> Result<(), String> {
        let want = self.run(device, kind, laid);
        let mut result = Ok(());
        for schedule in device.schedules() {
            device.set_schedule(schedule);
            if self.run(device, kind, laid) != want {
                result = Err(format!("{self:?}, {kind:?}: schedule {schedule} gives other bits"));
            }
        }
        device.set_schedule(0);
        result
    }
}

pub(crate) fn row(num_tokens: usize, position: usize) -> Row {
    Row { num_tokens, position }
}

fn case(element: Element, head_dim: usize, heads: [usize; 2], block_size: usize, rows: &[Row]) -> Case {
    Case { element, head_dim, num_heads: heads[0], num_kv_heads: heads[1], block_size, rows: rows.to_vec() }
}

/// Ragged decode rows: alone, around the ends of steps (32), blocks and tiles (128), several tokens, several tiles.
pub(crate) fn decode_rows() -> Vec<Row> {
    vec![row(1, 0), row(1, 31), row(2, 31), row(1, 127), row(1, 128), row(2, 300), row(1, 14)]
}

/// Every head size with a group of its own.
fn shapes() -> Vec<(usize, [usize; 2], usize)> {
    vec![
        (16, [4, 2], 16),
        (32, [8, 1], 64),
        (64, [3, 3], 16),
        (96, [6, 2], 128),
        (128, [7, 1], 32),
        (256, [2, 1], 256),
    ]
}

#[test]
fn decode_agrees_with_f64_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for element in Element::ALL {
        for (head_dim, heads, block_size) in shapes() {
            let case = case(element, head_dim, heads, block_size, &decode_rows());
            if device.has(&case.kernel("decode")) {
                case.check(device, Kind::Decode, &case.lay(1, 2)).unwrap();
            }
        }
    }
}

#[test]
fn prefill_agrees_with_f64_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for element in Element::ALL {
        for (head_dim, heads, block_size) in shapes() {
            let case = case(
                element,
                head_dim,
                heads,
                block_size,
                &[row(21, 0), row(1, 40), row(35, 118), row(3, 6)],
            );
            if device.has(&case.kernel("prefill")) {
                case.check(device, Kind::Prefill, &case.lay(3, 4)).unwrap();
            }
        }
    }
}

#[test]
fn decode_prefill_chunks_company_and_block_tables_change_no_bit() {
    let Some(device) = device_or_skip() else { return };
    for (head_dim, heads) in [(16, [4, 2]), (96, [6, 2]), (256, [2, 1])] {
        let element = if head_dim == 16 { Element::BF16 } else { Element::F16 };
        let all = case(element, head_dim, heads, 16, &decode_rows());
        if !device.has(&all.kernel("decode")) {
            continue;
        }
        let laid = all.lay(5, 6);
        let want = all.run(device, Kind::Decode, &laid);
        assert!(all.run(device, Kind::Prefill, &laid) == want, "prefill of {all:?}");
        assert!(all.run(device, Kind::Decode, &all.lay(5, 99)) == want, "another placement of {all:?}");
        // A prompt of 150 tokens at once, its tokens again in two rows, and one by one.
        let whole = case(element, head_dim, heads, 16, &[row(150, 0)]);
        let laid = whole.lay(7, 8);
        let want = whole.run(device, Kind::Prefill, &laid);
        let width = heads[0] * head_dim;
        for (num_tokens, position, kind) in
            [(13, 137, Kind::Prefill), (1, 149, Kind::Decode), (2, 63, Kind::Decode)]
        {
            let part = Case { rows: vec![row(num_tokens, position)], ..whole.clone() };
            let range = position * width..(position + num_tokens) * width;
            let Laid { layer, blocks, k, v, .. } = whole.lay(7, 8);
            let laid = Laid { q: laid.q[range.clone()].to_vec(), layer, blocks, k, v };
            assert!(part.run(device, kind, &laid) == want[range], "{part:?}, {kind:?}");
        }
    }
}

#[test]
fn no_schedule_of_warps_changes_a_bit_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for element in [Element::F16, Element::BF16] {
        let head_dim = if element == Element::F16 { 96 } else { 16 };
        let decode = case(element, head_dim, [4, 2], 16, &[row(1, 300), row(2, 50)]);
        decode.check_schedules(device, Kind::Decode, &decode.lay(9, 10)).unwrap();
        let prefill = case(element, head_dim, [4, 2], 16, &[row(40, 130)]);
        prefill.check_schedules(device, Kind::Prefill, &prefill.lay(11, 12)).unwrap();
    }
}
