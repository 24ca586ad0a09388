//! How far ahead of its use a product asks for its weights.
//!
//! Measured, since no manual tells: a core reads weights fastest with few requests of ours where its own prefetchers
//! follow a stream from memory well (AMD's Zen 4: by 40 % for one row), and with many far ahead where they do not (Intel), or
//! where rows make a stream so slow that they lose it.

use std::sync::OnceLock;

/// Bytes; more helps nowhere. On Intel 4 KiB reads an eighth less a second.
const FAR: usize = 16 * 1024;
/// Bytes: what is under way already.
const NEAR: usize = 512;
/// Rows with which a product waits for its weights more than for its arithmetic.
const FEW_ROWS: usize = 4;

/// Bytes, for a product of so many rows.
pub(crate) fn ahead(num_rows: usize) -> usize {
    if num_rows <= FEW_ROWS && follows_streams() { NEAR } else { FAR }
}

/// Whether this CPU's own prefetchers do better than ours with a stream; asked for once.
fn follows_streams() -> bool {
    static FOLLOWS: OnceLock<bool> = OnceLock::new();
    *FOLLOWS.get_or_init(is_amd)
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let id = std::arch::x86_64::__cpuid(0);
    [id.ebx, id.edx, id.ecx] == [*b"Auth", *b"enti", *b"cAMD"].map(u32::from_le_bytes)
}

#[cfg(not(target_arch = "x86_64"))]
const fn is_amd() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_ask_far_ahead_on_every_cpu() {
        assert_eq!(ahead(FEW_ROWS + 1), FAR);
        assert!([NEAR, FAR].contains(&ahead(1)));
        assert_eq!(ahead(1), ahead(FEW_ROWS));
    }
}
