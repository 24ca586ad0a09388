//! What a card's attention does in a second: decode's bytes of KV, prefill's operations, and beside them the bytes that the card copies. Figures, no test:
//! `tests/gpu/kernels` asks for them by `BATON_RATES_TOKENS`, the context.

use std::sync::Mutex;

use crate::attention::{Case, Kind, row};
use crate::card::Card;
use crate::device::{Arg, Device, Launch, input, number, output};
use crate::element::Element;
use crate::int8;

/// Times that each kernel runs unless `BATON_RATES_REPEATS` says otherwise.
const REPEATS: u32 = 50;
/// Sequences that decode.
const BATCH: usize = 32;

/// A card that adds up how long its kernels took, each alone and with its memory in place.
struct Stopwatch<'a> {
    card: &'a Card,
    seconds: Mutex<f64>,
    repeats: u32,
}

impl Device for Stopwatch<'_> {
    fn has(&self, kernel: &str) -> bool {
        self.card.has(kernel)
    }

    fn run(&self, launch: &Launch<'_>, args: &[Arg<'_>]) {
        *self.seconds.lock().unwrap() += self.card.run_again(launch, args, self.repeats);
    }
}

/// Seconds of all kernels that `work` runs.
fn seconds(card: &Card, work: impl FnOnce(&Stopwatch<'_>)) -> f64 {
    let told = std::env::var("BATON_RATES_REPEATS").ok();
    let repeats = told.map_or(REPEATS, |text| text.parse().expect("a number of repeats"));
    let watch = Stopwatch { card, seconds: Mutex::new(0.0), repeats };
    work(&watch);
    watch.seconds.into_inner().unwrap()
}

/// The shape of an 8B model's layer.
fn case(rows: Vec<crate::attention::Row>) -> Case {
    Case { element: Element::BF16, head_dim: 128, num_heads: 32, num_kv_heads: 8, block_size: 16, rows }
}

/// Seconds of a product with 8-bit weights, of the shape of an 8B model's FFN.
fn product_seconds(card: &Card, rows: usize, share: usize) -> f64 {
    let case = int8::Case { element: Element::BF16, rows, outputs: PRODUCT.0, inputs: PRODUCT.1 };
    let laid = case.lay();
    seconds(card, |watch| drop(case.run(watch, &laid, share, rows)))
}

const PRODUCT: (usize, usize) = (28_672, 4096);

#[test]
fn rates_of_a_card() {
    let Ok(tokens) = std::env::var("BATON_RATES_TOKENS") else { return };
    let (card, tokens) = (Card::open(), tokens.parse().expect("a number of tokens"));
    let decode = case(vec![row(1, tokens - 1); BATCH]);
    let laid = decode.lay(1, 2);
    let decode_seconds = seconds(&card, |watch| drop(decode.run(watch, Kind::Decode, &laid)));
    let token_bytes = 2 * decode.num_kv_heads * decode.head_dim * 2;
    let decode_bytes = (BATCH * tokens * token_bytes) as f64;

    let prefill = case(vec![row(tokens, 0)]);
    let laid = prefill.lay(3, 4);
    let prefill_seconds = seconds(&card, |watch| drop(prefill.run(watch, Kind::Prefill, &laid)));
    // A multiply-add is two; each of two products has one for every (query, position that it sees, element).
    let operations = (4 * prefill.num_heads * prefill.head_dim) as f64 * (tokens * (tokens + 1) / 2) as f64;

    let (num_blocks, len) = (BATCH * tokens / 16, 16 * token_bytes);
    let pairs: Vec<u32> =
        (0..num_blocks as u32).flat_map(|block| [block, num_blocks as u32 + block]).collect();
    let mut arena = vec![0u8; 2 * num_blocks * len];
    let copy_seconds = seconds(&card, |watch| {
        let args = [output(&mut arena), input(&pairs), number(2 * num_blocks), number(len)];
        watch.run(
            &Launch { kernel: "copy_blocks", grid: [num_blocks, 1, 1], threads: 256, shared_bytes: 0 },
            &args,
        );
    });
    let weights = (PRODUCT.0 * PRODUCT.1) as f64;
    let (few, batch) = (product_seconds(&card, 1, 0), product_seconds(&card, BATCH, 1));
    let many = product_seconds(&card, tokens, 2);
    println!(
        "\nrates: 8-bit products {:.1} GB/s of weights with 1 row, {:.1} with {BATCH}, {:.2} TFLOP/s with {tokens}",
        weights / few / 1e9,
        weights / batch / 1e9,
        2.0 * weights * tokens as f64 / many / 1e12,
    );
    println!(
        "rates: decode {:.1} GB/s of KV, copies {:.1} GB/s read and written, prefill {:.2} TFLOP/s; bf16, 32 heads of 128 over 8, {BATCH} rows, context {tokens}",
        decode_bytes / decode_seconds / 1e9,
        (2 * num_blocks * len) as f64 / copy_seconds / 1e9,
        operations / prefill_seconds / 1e12,
    );
}
