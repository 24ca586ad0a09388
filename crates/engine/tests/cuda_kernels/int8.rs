//! Products with 8-bit weights against f64, and the same bits whoever computes a row: alone, in company, by any of the kernels, in any schedule.

use crate::device::{Device, Launch, device_or_skip, input, number, output};
use crate::element::{Element, POISON};
use crate::support::Random;

/// By rows of activations that a block of threads takes: its outputs and its shared memory, as `ABI.md` has them.
const SHARES: [(usize, usize, usize); 3] = [(16, 32, 35_840), (32, 32, 39_936), (64, 64, 79_872)];

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) element: Element,
    pub(crate) rows: usize,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
}

/// Inputs of a case as a kernel takes them.
pub(crate) struct Laid {
    /// The rows, and one of NaNs after them.
    x: Vec<u16>,
    quants: Vec<u8>,
    scales: Vec<f32>,
}

/// Where `ABI.md` puts element `k` of a row: of each 16, pairs that are 8 apart lie side by side.
fn place(k: usize) -> usize {
    const ORDER: [usize; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];
    k / 16 * 16 + ORDER[k % 16]
}

impl Case {
    fn stride(&self) -> usize {
        self.inputs.next_multiple_of(16)
    }

    pub(crate) fn lay(&self) -> Laid {
        let mut random = Random((self.rows * 1000 + self.outputs + self.inputs) as u64);
        let mut x: Vec<u16> =
            (0..self.rows * self.inputs).map(|_| self.element.round(random.signed())).collect();
        x.extend(vec![POISON; self.inputs]);
        let mut quants = vec![0; self.outputs * self.stride()];
        for row in quants.chunks_exact_mut(self.stride()) {
            (0..self.inputs).for_each(|k| row[place(k)] = random.next() as u8);
        }
        let scales = (0..self.outputs).map(|_| 0.01 + random.signed().abs()).collect();
        Laid { x, quants, scales }
    }

    /// Element `k` of a row of the weight.
    fn quant(&self, laid: &Laid, row: usize, k: usize) -> f64 {
        f64::from(laid.quants[row * self.stride() + place(k)].cast_signed())
    }

    /// The first `rows` rows by kernel `share`; the output has a row more than these.
    pub(crate) fn run(&self, device: &dyn Device, laid: &Laid, share: usize, rows: usize) -> Vec<f32> {
        let (block_rows, block_outputs, shared_bytes) = SHARES[share];
        let kernel = format!("multiply_int8_{}_m{block_rows}", self.element.name());
        let mut out = vec![f32::NAN; (rows + 1) * self.outputs];
        let args = [
            output(&mut out),
            input(&laid.x),
            input(&laid.quants),
            input(&laid.scales),
            number(rows),
            number(self.outputs),
            number(self.inputs),
            number(self.stride()),
        ];
        let grid = [self.outputs.div_ceil(block_outputs), rows.div_ceil(block_rows), 1];
        device.run(&Launch { kernel: &kernel, grid, threads: 128, shared_bytes }, &args);
        out
    }

    /// The kernel's results against f64.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn check(&self, device: &dyn Device, laid: &Laid, share: usize) -> Result<Vec<f32>, String> {
        let out = self.run(device, laid, share, self.rows);
        let (results, beyond) = out.split_at(self.rows * self.outputs);
        if beyond.iter().any(|x| !x.is_nan()) {
            return Err(format!("{self:?}: written beyond the last row"));
        }
        for (nth, got) in results.iter().enumerate() {
            let (row, output) = (nth / self.outputs, nth % self.outputs);
            let x = |k: usize| self.element.widen(laid.x[row * self.inputs + k]);
            let scale = f64::from(laid.scales[output]);
            let terms: Vec<f64> =
                (0..self.inputs).map(|k| x(k) * self.quant(laid, output, k) * scale).collect();
            // Sums in f32, some of a tensor core's own way.
            let bound = 1e-6 * terms.iter().map(|term| term.abs()).sum::<f64>();
            let error = (f64::from(*got) - terms.iter().sum::<f64>()).abs();
            if error.is_nan() || error > bound {
                return Err(format!("{self:?}, row {row}, output {output}: {error} beyond {bound}"));
            }
        }
        Ok(results.to_vec())
    }

    /// Every schedule of warps gives the same bits.
    ///
    /// # Errors
    /// Which does not.
    pub(crate) fn check_schedules(
        &self,
        device: &dyn Device,
        laid: &Laid,
        share: usize,
    ) -> Result<(), String> {
        let mut results = device.schedules().into_iter().map(|schedule| {
            device.set_schedule(schedule);
            bits(&self.run(device, laid, share, self.rows))
        });
        let first = results.next();
        let others: Vec<_> = results.collect();
        device.set_schedule(0);
        match others.iter().position(|other| Some(other) != first.as_ref()) {
            Some(nth) => Err(format!("{self:?}: schedule {} gives other bits", nth + 1)),
            None => Ok(()),
        }
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn products_of_all_shapes_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for element in Element::ALL {
        for (rows, outputs, inputs) in
            [(1, 8, 8), (3, 40, 72), (16, 33, 128), (17, 100, 200), (33, 64, 512), (70, 65, 328)]
        {
            let case = Case { element, rows, outputs, inputs };
            let laid = case.lay();
            // By every kernel, whichever the engine would take; each sums in the same order.
            let all = [0, 1, 2].map(|share| case.check(device, &laid, share).unwrap());
            assert!(bits(&all[0]) == bits(&all[1]) && bits(&all[0]) == bits(&all[2]), "{case:?}");
        }
    }
}

#[test]
fn a_row_of_a_product_has_the_same_bits_alone_and_in_company() {
    let Some(device) = device_or_skip() else { return };
    for element in Element::ALL {
        let case = Case { element, rows: 40, outputs: 48, inputs: 264 };
        let mut laid = case.lay();
        let together = bits(&case.run(device, &laid, 2, 40));
        for nth in [0, 7, 39] {
            let alone = laid.x[nth * case.inputs..][..case.inputs].to_vec();
            laid.x[..case.inputs].copy_from_slice(&alone);
            for share in 0..3 {
                let out = bits(&case.run(device, &laid, share, 1));
                assert_eq!(out[..case.outputs], together[nth * case.outputs..][..case.outputs], "row {nth}");
            }
        }
    }
}

#[test]
fn products_in_every_schedule_of_warps_are_the_same_bits() {
    let Some(device) = device_or_skip() else { return };
    for (share, rows) in [(0, 5), (1, 20), (2, 66)] {
        let case = Case { element: Element::BF16, rows, outputs: 70, inputs: 776 };
        case.check_schedules(device, &case.lay(), share).unwrap();
    }
}

#[test]
fn embedding_of_8_bits_gathers_rows_within_bounds() {
    let Some(device) = device_or_skip() else { return };
    for hidden in [64, 200, 576] {
        let case = Case { element: Element::F16, rows: 0, outputs: 11, inputs: hidden };
        let laid = case.lay();
        let tokens = [3u32, 10, 0, 3];
        let mut residual = vec![f32::NAN; tokens.len() * hidden];
        let args = [
            output(&mut residual),
            input(&laid.quants),
            input(&laid.scales),
            input(&tokens),
            number(hidden),
            number(case.stride()),
        ];
        let launch =
            Launch { kernel: "embed_int8", grid: [tokens.len(), 1, 1], threads: 256, shared_bytes: 0 };
        device.run(&launch, &args);
        for (nth, &token) in tokens.iter().enumerate() {
            for k in 0..hidden {
                let want = case.quant(&laid, token as usize, k) as f32 * laid.scales[token as usize];
                assert_eq!(residual[nth * hidden + k], want, "token {nth}, element {k}");
            }
        }
    }
}
