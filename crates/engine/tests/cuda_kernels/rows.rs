//! Embedding, normalisation, rotation and activation against f64.

use crate::device::{Arg, Device, Launch, device_or_skip, input, number, output};
use crate::element::{Element, POISON, largest_error};
use crate::support::Random;

fn floats(random: &mut Random, n: usize, scale: f32) -> Vec<f32> {
    (0..n).map(|_| random.signed() * scale).collect()
}

fn launch(kernel: &str, grid: [usize; 3]) -> Launch<'_> {
    Launch { kernel, grid, threads: 256, shared_bytes: 0 }
}

/// One rounding to 16 bits, and f32 before it.
fn bound(element: Element) -> f64 {
    element.unit() + 2e-6
}

#[test]
fn embedding_gathers_rows_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for element in Element::ALL {
        for hidden in [64, 576, 2000] {
            let mut random = Random(1);
            let table: Vec<u16> = (0..11 * hidden).map(|_| element.round(random.signed())).collect();
            let tokens = [3u32, 10, 0, 3];
            let mut residual = vec![f32::NAN; tokens.len() * hidden];
            let kernel = format!("embed_{}", element.name());
            let args = [output(&mut residual), input(&table), input(&tokens), number(hidden)];
            device.run(&launch(&kernel, [tokens.len(), 1, 1]), &args);
            for (n, &token) in tokens.iter().enumerate() {
                let row = &table[token as usize * hidden..][..hidden];
                for (got, &want) in residual[n * hidden..].iter().zip(row) {
                    assert_eq!(f64::from(*got), element.widen(want));
                }
            }
        }
    }
}

/// Rows `select` of 5, or all; with or without something to add.
fn check_norm(device: &dyn Device, element: Element, hidden: usize, select: Option<&[u32]>, add: bool) {
    let (mut random, num_rows, eps) = (Random(hidden as u64), 5, 1e-5f32);
    let mut residual = floats(&mut random, num_rows * hidden, 3.0);
    let (projected, weight) = (floats(&mut random, num_rows * hidden, 1.0), floats(&mut random, hidden, 1.0));
    let before = residual.clone();
    let all: Vec<u32> = (0..num_rows as u32).collect();
    let rows = select.unwrap_or(&all);
    let mut normed = vec![POISON; rows.len() * hidden];
    let kernel = format!("add_norm_{}", element.name());
    let args = [
        output(&mut normed),
        output(&mut residual),
        if add { input(&projected) } else { Arg::Null },
        input(&weight),
        select.map_or(Arg::Null, input),
        number(hidden),
        Arg::F32(eps),
    ];
    device.run(&Launch { shared_bytes: 64, ..launch(&kernel, [rows.len(), 1, 1]) }, &args);
    for row in 0..num_rows {
        let touched = add && rows.contains(&(row as u32));
        for i in row * hidden..(row + 1) * hidden {
            assert_eq!(residual[i], if touched { before[i] + projected[i] } else { before[i] });
        }
    }
    for (n, &row) in rows.iter().enumerate() {
        let x: Vec<f64> = residual[row as usize * hidden..][..hidden].iter().map(|&x| f64::from(x)).collect();
        let mean = x.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
        let want = x.iter().zip(&weight).map(|(x, w)| x / (mean + f64::from(eps)).sqrt() * f64::from(*w));
        let got = normed[n * hidden..][..hidden].iter().map(|&x| element.widen(x));
        let error = largest_error(got, want);
        assert!(error <= bound(element), "{element:?}, {hidden}: {error}");
    }
}

#[test]
fn norms_add_select_and_scale_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for element in Element::ALL {
        for hidden in [64, 100, 2304] {
            check_norm(device, element, hidden, None, false);
            check_norm(device, element, hidden, None, true);
            check_norm(device, element, hidden, Some(&[4, 1, 2]), true);
        }
    }
}

#[test]
fn silu_times_up_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for element in Element::ALL {
        for ffn in [128, 1500] {
            let both = floats(&mut Random(2), 3 * 2 * ffn, 6.0);
            let mut out = vec![POISON; 3 * ffn];
            let kernel = format!("silu_mul_{}", element.name());
            let args = [output(&mut out), input(&both), input(&both[ffn..]), number(ffn), number(2 * ffn)];
            device.run(&launch(&kernel, [3, ffn.div_ceil(1024), 1]), &args);
            let want = (0..3 * ffn).map(|i| {
                let at = i / ffn * 2 * ffn + i % ffn;
                let (gate, up) = (f64::from(both[at]), f64::from(both[at + ffn]));
                gate / (1.0 + (-gate).exp()) * up
            });
            let error = largest_error(out.iter().map(|&x| element.widen(x)), want);
            assert!(error <= bound(element), "{element:?}, {ffn}: {error}");
        }
    }
}

/// A shape of heads for `rope_kv`.
#[derive(Clone, Copy, Debug)]
struct Heads {
    element: Element,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    interleaved: bool,
    /// Bias and norms of heads.
    extras: bool,
}

impl Heads {
    fn all(&self) -> usize {
        self.num_heads + 2 * self.num_kv_heads
    }

    /// One head of q, k or v as it should be: `norm` and `turns` where there are any.
    fn reference(&self, x: &[f64], norm: Option<&[f32]>, turns: Option<&[f32]>) -> Vec<f64> {
        let mut x = x.to_vec();
        if let Some(norm) = norm {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            x.iter_mut().zip(norm).for_each(|(x, w)| *x *= f64::from(*w) / (mean + 1e-6).sqrt());
        }
        let Some(turns) = turns else { return x };
        let half = self.head_dim / 2;
        for pair in 0..half {
            let (i, j) = if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let (cos, sin, a, b) = (f64::from(turns[pair]), f64::from(turns[half + pair]), x[i], x[j]);
            (x[i], x[j]) = (a * cos - b * sin, a * sin + b * cos);
        }
        x
    }

    /// Elements of a block in one layer.
    fn block(&self) -> usize {
        2 * self.num_kv_heads * self.block_size * self.head_dim
    }

    /// Inputs of 4 tokens, of which the third is padding, and 4 blocks.
    fn lay(&self) -> Stored {
        let (mut random, context, dim) = (Random(5), 40, self.head_dim);
        let size = self.block_size as u32;
        Stored {
            positions: [7, 39, 0, 8],
            slots: [0, size * 3 - 1, u32::MAX, size + 1],
            qkv: floats(&mut random, 4 * self.all() * dim, 2.0),
            bias: floats(&mut random, self.all() * dim, 1.0),
            norms: [(); 2].map(|()| floats(&mut random, dim, 1.0)),
            turns: floats(&mut random, context * dim, 1.0),
            q: vec![POISON; 4 * self.num_heads * dim],
            layer: vec![POISON; 4 * self.block()],
        }
    }

    fn run(&self, device: &dyn Device, s: &mut Stored) {
        let extra = |x| if self.extras { input(x) } else { Arg::Null };
        let [heads, kv_heads, head_dim, block_size] =
            [self.num_heads, self.num_kv_heads, self.head_dim, self.block_size].map(number);
        let kernel = format!("rope_kv_{}", self.element.name());
        let args = [
            output(&mut s.q),
            output(&mut s.layer),
            input(&s.qkv),
            extra(&s.bias),
            extra(&s.norms[0]),
            extra(&s.norms[1]),
            input(&s.turns),
            input(&s.positions),
            input(&s.slots),
            heads,
            kv_heads,
            head_dim,
            block_size,
            Arg::I32(i32::from(self.interleaved)),
            Arg::F32(1e-6),
        ];
        device.run(&launch(&kernel, [s.positions.len(), self.all().div_ceil(8), 1]), &args);
    }

    /// What a token's head should be.
    fn want(&self, s: &Stored, token: usize, head: usize) -> Vec<f64> {
        let dim = self.head_dim;
        let at = (token * self.all() + head) * dim;
        let bias = |d: usize| if self.extras { s.bias[head * dim + d] } else { 0.0 };
        let x: Vec<f64> = (0..dim).map(|d| f64::from(s.qkv[at + d] + bias(d))).collect();
        let turns = Some(&s.turns[s.positions[token] as usize * dim..][..dim]);
        let (norm, turns) = match head {
            _ if head < self.num_heads => (Some(&s.norms[0]), turns),
            _ if head < self.num_heads + self.num_kv_heads => (Some(&s.norms[1]), turns),
            _ => (None, None),
        };
        self.reference(&x, norm.filter(|_| self.extras).map(|norm| &norm[..]), turns)
    }

    fn check(&self, device: &dyn Device) {
        let mut s = self.lay();
        self.run(device, &mut s);
        let dim = self.head_dim;
        let mut written = vec![false; s.layer.len()];
        for token in 0..s.positions.len() {
            for head in 0..self.all() {
                let got = if head < self.num_heads {
                    &s.q[(token * self.num_heads + head) * dim..][..dim]
                } else if s.slots[token] == u32::MAX {
                    continue;
                } else {
                    let slot = s.slots[token] as usize;
                    let nth = (head - self.num_heads) * self.block_size + slot % self.block_size;
                    let at = slot / self.block_size * self.block() + nth * dim;
                    written[at..at + dim].fill(true);
                    &s.layer[at..at + dim]
                };
                let got = got.iter().map(|&x| self.element.widen(x));
                let error = largest_error(got, self.want(&s, token, head).into_iter());
                assert!(error <= bound(self.element), "{self:?}, token {token}, head {head}: {error}");
            }
        }
        let spoiled = s.layer.iter().zip(&written).any(|(&x, &written)| !written && x != POISON);
        assert!(!spoiled, "{self:?}: KV is written where no token is");
    }
}

/// What `rope_kv` is given and gives.
struct Stored {
    positions: [u32; 4],
    slots: [u32; 4],
    qkv: Vec<f32>,
    bias: Vec<f32>,
    /// Of queries, of keys.
    norms: [Vec<f32>; 2],
    turns: Vec<f32>,
    q: Vec<u16>,
    layer: Vec<u16>,
}

#[test]
fn heads_are_biased_normalised_turned_and_stored_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for element in Element::ALL {
        for (num_heads, num_kv_heads, head_dim) in
            [(4, 2, 16), (9, 3, 64), (3, 1, 96), (5, 5, 128), (2, 1, 256)]
        {
            for (interleaved, extras, block_size) in [(true, false, 16), (false, true, 32)] {
                Heads { element, num_heads, num_kv_heads, head_dim, block_size, interleaved, extras }
                    .check(device);
            }
        }
    }
}
