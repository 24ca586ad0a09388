//! How far ahead of its use a product asks for its weights.
//!
//! Measured, since no manual tells: a core reads weights fastest with few requests of ours where its own prefetchers
//! follow a stream from memory well (AMD's Zen 4: by 40 % for one row), with more of them on its successor (by 20 %), and with many
//! far ahead where they do not (Intel), or where rows make a stream so slow that they lose it.

use std::sync::OnceLock;

/// Bytes; more helps nowhere. On Intel 4 KiB reads an eighth less a second.
const FAR: usize = 16 * 1024;
/// Bytes for few rows on AMD's Zen 5 and what follows: 4 and 16 KiB read a twentieth less a second.
const MIDDLE: usize = 8 * 1024;
/// Bytes for few rows on AMD's earlier CPUs: what is under way already.
const NEAR: usize = 512;
/// Rows with which a product waits for its weights more than for its arithmetic.
const FEW_ROWS: usize = 4;
/// AMD's family of Zen 5.
const ZEN_5: u32 = 0x1a;

/// Bytes, for a product of so many rows.
pub(crate) fn ahead(num_rows: usize) -> usize {
    static FOR_FEW: OnceLock<usize> = OnceLock::new();
    if num_rows > FEW_ROWS { FAR } else { *FOR_FEW.get_or_init(|| for_few(amd_family())) }
}

const fn for_few(amd_family: Option<u32>) -> usize {
    match amd_family {
        Some(ZEN_5..) => MIDDLE,
        Some(_) => NEAR,
        None => FAR,
    }
}

/// The family of an AMD CPU, base and extended as one number.
#[cfg(target_arch = "x86_64")]
fn amd_family() -> Option<u32> {
    use std::arch::x86_64::__cpuid;
    let id = __cpuid(0);
    let is_amd = [id.ebx, id.edx, id.ecx] == [*b"Auth", *b"enti", *b"cAMD"].map(u32::from_le_bytes);
    let signature = __cpuid(1).eax;
    is_amd.then_some((signature >> 8 & 0xf) + (signature >> 20 & 0xff))
}

#[cfg(not(target_arch = "x86_64"))]
const fn amd_family() -> Option<u32> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_ask_far_ahead_on_every_cpu() {
        assert_eq!(ahead(FEW_ROWS + 1), FAR);
        assert_eq!(ahead(1), ahead(FEW_ROWS));
    }

    #[test]
    fn few_rows_ask_as_far_ahead_as_their_cpu_likes() {
        // Zen 2, Zen 4, Zen 5, one to come, and another maker's.
        let families = [Some(0x17), Some(0x19), Some(0x1a), Some(0x1b), None];
        assert_eq!(families.map(for_few), [NEAR, NEAR, MIDDLE, MIDDLE, FAR]);
        assert_eq!(ahead(1), for_few(amd_family()));
    }
}
