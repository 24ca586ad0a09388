//! Weights as they are stored: raw GGML blocks, row by row.

use std::borrow::Cow;
use std::fmt;

use candle_core::quantized::GgmlDType;
use half::{bf16, f16};

/// How the elements of a tensor are stored. Layouts are GGML's, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// IEEE 754 single.
    F32,
    /// IEEE 754 half.
    F16,
    /// bfloat16.
    BF16,
    /// 32 elements: f16 scale `d`, 32 x i8 `q`; the value is `d * q`.
    Q8_0,
    /// 32 elements: f16 scale `d`, 16 bytes; the low nibble of byte `j` is element `j`, the high one element `j + 16`;
    /// the value is `d * (nibble - 8)`.
    Q4_0,
    /// 32 elements: f16 scale `d`, f16 minimum `m`, 16 bytes of nibbles as in `Q4_0`; the value is `d * nibble + m`.
    Q4_1,
}

impl WeightType {
    /// All types that can be read.
    pub const ALL: [WeightType; 6] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Q8_0,
        WeightType::Q4_0,
        WeightType::Q4_1,
    ];

    /// Elements in one block.
    pub const fn block_elements(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => 1,
            WeightType::Q8_0 | WeightType::Q4_0 | WeightType::Q4_1 => 32,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            WeightType::F32 => 4,
            WeightType::F16 | WeightType::BF16 => 2,
            WeightType::Q8_0 => 2 + 32,
            WeightType::Q4_0 => 2 + 16,
            WeightType::Q4_1 => 2 + 2 + 16,
        }
    }

    /// Bytes of a row of `cols` elements; `None` if a row is not a whole number of blocks or the size overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_elements()) {
            return None;
        }
        (cols / self.block_elements()).checked_mul(self.block_bytes())
    }

    pub(crate) fn from_ggml(dtype: GgmlDType) -> Option<WeightType> {
        match dtype {
            GgmlDType::F32 => Some(WeightType::F32),
            GgmlDType::F16 => Some(WeightType::F16),
            GgmlDType::BF16 => Some(WeightType::BF16),
            GgmlDType::Q8_0 => Some(WeightType::Q8_0),
            GgmlDType::Q4_0 => Some(WeightType::Q4_0),
            GgmlDType::Q4_1 => Some(WeightType::Q4_1),
            _ => None,
        }
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// One weight tensor: `rows` rows of `cols` elements, rows contiguous, one after the other.
///
/// A matrix maps an input of `cols` elements to an output of `rows`; a vector (a norm) is one row. `data` holds
/// exactly `rows * kind.row_bytes(cols)` bytes; no alignment is promised.
#[derive(Debug, Clone)]
pub struct Tensor<'a> {
    /// Name in GGUF's scheme, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// Output elements.
    pub rows: usize,
    /// Input elements, contiguous.
    pub cols: usize,
    /// Storage of the elements.
    pub kind: WeightType,
    /// Raw blocks, row-major.
    pub data: Cow<'a, [u8]>,
}

impl Tensor<'_> {
    /// The same values as F32; exact. Tensors of quantised types stay as they are.
    pub(crate) fn widened(self) -> Self {
        let (halves, _) = self.data.as_chunks::<2>();
        let data: Vec<u8> = match self.kind {
            WeightType::F16 => {
                halves.iter().flat_map(|&b| f16::from_le_bytes(b).to_f32().to_le_bytes()).collect()
            }
            WeightType::BF16 => {
                halves.iter().flat_map(|&b| bf16::from_le_bytes(b).to_f32().to_le_bytes()).collect()
            }
            _ => return self,
        };
        Tensor { kind: WeightType::F32, data: Cow::Owned(data), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_are_those_of_ggml() {
        for (kind, dtype) in [
            (WeightType::F32, GgmlDType::F32),
            (WeightType::F16, GgmlDType::F16),
            (WeightType::BF16, GgmlDType::BF16),
            (WeightType::Q8_0, GgmlDType::Q8_0),
            (WeightType::Q4_0, GgmlDType::Q4_0),
            (WeightType::Q4_1, GgmlDType::Q4_1),
        ] {
            assert_eq!(kind.block_elements(), dtype.block_size());
            assert_eq!(kind.block_bytes(), dtype.type_size());
            assert_eq!(WeightType::from_ggml(dtype), Some(kind));
        }
        assert_eq!(WeightType::from_ggml(GgmlDType::Q6K), None);
    }

    #[test]
    fn halves_widen_exactly() {
        let tensor = |kind, data: &[u8]| Tensor {
            name: "n".to_owned(),
            rows: 1,
            cols: 2,
            kind,
            data: data.to_vec().into(),
        };
        let wide = |kind, data: &[u8]| tensor(kind, data).widened();
        let expected: Vec<u8> = [1.5f32, -0.25].iter().flat_map(|value| value.to_le_bytes()).collect();
        for (kind, data) in
            [(WeightType::F16, [0, 0x3e, 0, 0xb4]), (WeightType::BF16, [0xc0, 0x3f, 0x80, 0xbe])]
        {
            let wide = wide(kind, &data);
            assert_eq!((wide.kind, &*wide.data), (WeightType::F32, expected.as_slice()));
        }
        assert_eq!(wide(WeightType::F32, &expected).data, expected);
        assert_eq!(wide(WeightType::Q8_0, &[7; 34]).kind, WeightType::Q8_0);
    }

    #[test]
    fn a_row_is_whole_blocks_or_nothing() {
        assert_eq!(WeightType::Q4_1.row_bytes(64), Some(40));
        assert_eq!(WeightType::Q4_1.row_bytes(33), None);
        assert_eq!(WeightType::F32.row_bytes(usize::MAX), None);
    }
}
