//! CRC-32C by carry-less multiplication, where the CPU has it on wide vectors: two to four times as fast as by its own instruction.

/// The CRC-32C of what `crc` covers, followed by `bytes`; `crc` is 0 when it covers nothing.
pub fn append(crc: u32, bytes: &[u8]) -> u32 {
    let (start, rest) = bytes.split_at(bytes.len() - bytes.len() % STEP);
    let Some(folds) = wide::folds().filter(|_| !start.is_empty()) else {
        return crc32c::crc32c_append(crc, bytes);
    };
    let nothing = Piece { from: start.as_ptr(), to: std::ptr::null_mut(), len: start.len() };
    // SAFETY: the CPU can, as it was asked.
    crc32c::crc32c_append(unsafe { (folds.sum)(crc, nothing) }, rest)
}

/// Copies bytes, and returns the CRC-32C of what `crc` covers followed by them: while some are summed, the next ones come from memory. Each is
/// looked at once, so what is summed is what is written, even if another process changes the source meanwhile.
/// With `far`, they are written past the caches, since nobody reads them soon; [`order_streamed`] must follow on this thread before anybody else may get at
/// them, to read or to write.
///
/// # Safety
/// `from` covers `to.len()` bytes outside `to`.
pub(crate) unsafe fn append_copied(crc: u32, from: *const u8, to: &mut [u8], far: bool) -> u32 {
    let start = to.len() - to.len() % STEP;
    let folds = wide::folds().filter(|_| start > 0);
    let (crc, done) = match folds {
        Some(folds) => {
            let is_aligned = to.as_ptr().addr().is_multiple_of(64);
            let fold = if far && is_aligned { folds.sum_and_stream } else { folds.sum_and_copy };
            // SAFETY: the CPU can, as it was asked; the start lies within both.
            (unsafe { fold(crc, Piece { from, to: to.as_mut_ptr(), len: start }) }, start)
        }
        None => (crc, 0),
    };
    let rest = &mut to[done..];
    // SAFETY: so many bytes are left from there on.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), rest.as_mut_ptr(), rest.len()) };
    crc32c::crc32c_append(crc, rest)
}

/// What this thread wrote past the caches comes before whatever it writes from here on: streaming stores are ordered by no lock and no atomic. Once for many
/// copies, since it waits until all of them have reached memory.
pub(crate) fn order_streamed() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every CPU of this kind has the instruction, and it touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Bytes of one step of folding.
const STEP: usize = 256;

/// What one call folds.
#[derive(Clone, Copy)]
struct Piece {
    from: *const u8,
    /// Where it is copied, aligned to 64 bytes if it is streamed there.
    to: *mut u8,
    /// A multiple of [`STEP`], at least one.
    len: usize,
}

/// Appends a piece to a sum. Sound on a CPU that has what it needs, if both pointers cover the piece (`to` only if it is copied).
type Fold = unsafe fn(u32, Piece) -> u32;

/// One instruction set's.
#[derive(Clone, Copy)]
struct Folds {
    #[cfg_attr(not(test), expect(dead_code, reason = "tests name what they checked"))]
    name: &'static str,
    sum: Fold,
    sum_and_copy: Fold,
    sum_and_stream: Fold,
}

/// Folding by carry-less multiplication, 256 bytes a step: so many lanes of 16 bytes are each moved 256 bytes ahead and added to what stands there.
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::asm;
    use std::arch::x86_64::*;

    use super::{Folds, Piece, STEP};

    /// x^(8 * distance + 31) and x^(8 * distance - 33) modulo the polynomial, bits reversed: what moves 16 bytes this far ahead.
    const MOVE_256: [i64; 2] = [0xdcb1_7aa4, 0xb9e0_2b86];
    const MOVE_16: [i64; 2] = [0xf20c_0dfe, 0x493c_7d27];

    const LANES: usize = STEP / 16;

    /// How far ahead bytes are asked for, which the CPU by itself does within a page of 4 KiB only: a sum over what comes from memory ran at 15 instead of 9
    /// GB/s, and a copy with it at 11 instead of 10.
    const AHEAD: usize = 2048;

    /// What becomes of the bytes.
    const SUM: u8 = 0;
    const COPY: u8 = 1;
    const STREAM: u8 = 2;

    const AVX512: Folds = Folds {
        name: "avx512",
        sum: fold_512::<SUM>,
        sum_and_copy: fold_512::<COPY>,
        sum_and_stream: fold_512::<STREAM>,
    };
    const AVX2: Folds = Folds {
        name: "avx2",
        sum: fold_256::<SUM>,
        sum_and_copy: fold_256::<COPY>,
        sum_and_stream: fold_256::<STREAM>,
    };

    /// The widest that this CPU has.
    pub(super) fn folds() -> Option<Folds> {
        [AVX512, AVX2].into_iter().zip(has()).find_map(|(folds, has)| has.then_some(folds))
    }

    /// All that this CPU has.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Folds> {
        [AVX512, AVX2].into_iter().zip(has()).filter_map(|(folds, has)| has.then_some(folds)).collect()
    }

    fn has() -> [bool; 2] {
        let folds = is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("sse4.2");
        [folds && is_x86_feature_detected!("avx512f"), folds && is_x86_feature_detected!("avx2")]
    }

    /// # Safety
    /// The CPU has the features; the pointers are as [`super::Fold`] says.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    unsafe fn fold_512<const MODE: u8>(crc: u32, piece: Piece) -> u32 {
        let take = |at: usize| {
            // SAFETY: 64 bytes from `at` on lie within the piece, and any address may be asked for ahead. The empty instruction makes one value of what was
            // loaded, which is not loaded again.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(piece.from.wrapping_add(at + AHEAD).cast());
                let mut bytes = _mm512_loadu_si512(piece.from.add(at).cast());
                asm!("/* {} */", inout(zmm_reg) bytes, options(nomem, nostack, preserves_flags));
                match MODE {
                    COPY => _mm512_storeu_si512(piece.to.add(at).cast(), bytes),
                    STREAM => _mm512_stream_si512(piece.to.add(at).cast(), bytes),
                    _ => {}
                }
                bytes
            }
        };
        let by = _mm512_broadcast_i32x4(_mm_set_epi64x(MOVE_256[1], MOVE_256[0]));
        let start = _mm512_zextsi128_si512(_mm_cvtsi64_si128(i64::from(!crc)));
        let mut sums: [__m512i; 4] = [_mm512_xor_si512(take(0), start), take(64), take(128), take(192)];
        for at in (STEP..piece.len).step_by(STEP) {
            for (nth, sum) in sums.iter_mut().enumerate() {
                let low = _mm512_clmulepi64_epi128::<0x00>(*sum, by);
                let high = _mm512_clmulepi64_epi128::<0x11>(*sum, by);
                // All three exclusively or'ed.
                *sum = _mm512_ternarylogic_epi64::<0x96>(low, high, take(at + nth * 64));
            }
        }
        // SAFETY: both are 256 bytes.
        join(unsafe { std::mem::transmute::<[__m512i; 4], [__m128i; LANES]>(sums) })
    }

    /// # Safety
    /// As [`fold_512`].
    #[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
    unsafe fn fold_256<const MODE: u8>(crc: u32, piece: Piece) -> u32 {
        let take = |at: usize| {
            // SAFETY: as above, for 32 bytes.
            unsafe {
                if at.is_multiple_of(64) {
                    _mm_prefetch::<_MM_HINT_T0>(piece.from.wrapping_add(at + AHEAD).cast());
                }
                let mut bytes = _mm256_loadu_si256(piece.from.add(at).cast());
                asm!("/* {} */", inout(ymm_reg) bytes, options(nomem, nostack, preserves_flags));
                match MODE {
                    COPY => _mm256_storeu_si256(piece.to.add(at).cast(), bytes),
                    STREAM => _mm256_stream_si256(piece.to.add(at).cast(), bytes),
                    _ => {}
                }
                bytes
            }
        };
        let by = _mm256_broadcastsi128_si256(_mm_set_epi64x(MOVE_256[1], MOVE_256[0]));
        let start = _mm256_zextsi128_si256(_mm_cvtsi64_si128(i64::from(!crc)));
        let mut sums: [__m256i; 8] = std::array::from_fn(|nth| take(nth * 32));
        sums[0] = _mm256_xor_si256(sums[0], start);
        for at in (STEP..piece.len).step_by(STEP) {
            for (nth, sum) in sums.iter_mut().enumerate() {
                let low = _mm256_clmulepi64_epi128::<0x00>(*sum, by);
                let high = _mm256_clmulepi64_epi128::<0x11>(*sum, by);
                *sum = _mm256_xor_si256(_mm256_xor_si256(low, high), take(at + nth * 32));
            }
        }
        // SAFETY: both are 256 bytes.
        join(unsafe { std::mem::transmute::<[__m256i; 8], [__m128i; LANES]>(sums) })
    }

    /// Moves each lane onto the next one, and takes the sum of the last.
    #[target_feature(enable = "pclmulqdq,sse4.2")]
    fn join(lanes: [__m128i; LANES]) -> u32 {
        let by = _mm_set_epi64x(MOVE_16[1], MOVE_16[0]);
        let mut sum = lanes[0];
        for lane in &lanes[1..] {
            let (low, high) = (_mm_clmulepi64_si128::<0x00>(sum, by), _mm_clmulepi64_si128::<0x11>(sum, by));
            sum = _mm_xor_si128(_mm_xor_si128(low, high), *lane);
        }
        let (low, high) = (_mm_extract_epi64::<0>(sum), _mm_extract_epi64::<1>(sum));
        !(_mm_crc32_u64(_mm_crc32_u64(0, low.cast_unsigned()), high.cast_unsigned()) as u32)
    }
}

/// Other CPUs: nothing is folded.
#[cfg(not(target_arch = "x86_64"))]
mod wide {
    use super::Folds;

    pub(super) const fn folds() -> Option<Folds> {
        None
    }

    #[cfg(test)]
    pub(super) fn all() -> Vec<Folds> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn sums_are_those_of_the_plain_algorithm() {
        assert_eq!(append(0, b"123456789"), 0xE306_9283);
        for len in (0..1100).chain([4096, 4097, 12_288, 12_289, 65_535]) {
            for (offset, before) in [(0, 0), (1, 0xFFFF_FFFF), (13, 0x1234_5678)] {
                let from = bytes(len + offset, len as u64);
                let from = &from[offset..];
                let wanted = crc32c::crc32c_append(before, from);
                assert_eq!(append(before, from), wanted, "{len} bytes");
            }
        }
    }

    #[test]
    fn every_way_of_folding_sums_and_copies_alike() {
        for folds in wide::all() {
            for num_steps in 1..20 {
                let len = num_steps * STEP;
                let from = bytes(len + 1, 7);
                for (skip, before) in [(0, 0), (1, 0x89AB_CDEF)] {
                    let from = &from[skip..skip + len];
                    let mut to = vec![0; len + 64];
                    let place = to.as_ptr().align_offset(64);
                    let all = [(folds.sum, false), (folds.sum_and_copy, true), (folds.sum_and_stream, true)];
                    for (fold, copies) in all {
                        to.fill(0);
                        let piece = Piece { from: from.as_ptr(), to: to[place..].as_mut_ptr(), len };
                        // SAFETY: this CPU has it; there is room, and it is aligned.
                        let sum = unsafe { fold(before, piece) };
                        assert_eq!(sum, crc32c::crc32c_append(before, from), "{}", folds.name);
                        assert_eq!(&to[place..place + len] == from, copies, "{}: {num_steps}", folds.name);
                    }
                }
            }
            eprintln!("checked {}", folds.name);
        }
    }

    #[test]
    fn what_is_copied_is_what_is_summed_and_nothing_beyond() {
        for len in [0, 1, 255, 256, 257, 1000, 12_288, 12_300] {
            let from = bytes(len, len as u64);
            for (place, far) in [(0, false), (0, true), (1, true), (64, true)] {
                let mut to = vec![0xEE; len + 192];
                let place = to.as_ptr().align_offset(64) + place;
                // SAFETY: both have `len` bytes.
                let sum = unsafe { append_copied(5, from.as_ptr(), &mut to[place..place + len], far) };
                assert_eq!((sum, &to[place..place + len]), (append(5, &from), &from[..]));
                let (before, after) = (&to[..place], &to[place + len..]);
                assert!(before.iter().chain(after).all(|&byte| byte == 0xEE), "{len} to {place}");
            }
        }
    }

    #[test]
    fn a_sum_in_parts_is_the_sum() {
        let all = bytes(10_000, 5);
        for cut in [0, 1, 255, 256, 257, 5000, 10_000] {
            assert_eq!(append(append(0, &all[..cut]), &all[cut..]), crc32c::crc32c(&all), "{cut}");
        }
    }
}
