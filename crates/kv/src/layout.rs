//! What one block of KV looks like.

use std::fmt;
use std::str::FromStr;

use crate::BlockOrder;

/// Element type of K and V in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// The upper half of a 32-bit IEEE float.
    BF16,
    /// 8-bit float with 4 bits of exponent (e4m3), and for each head of a token one byte of a common power of two.
    Fp8,
}

impl KvDtype {
    /// Every one.
    pub const ALL: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::BF16, KvDtype::Fp8];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Fp8 => 1,
        }
    }

    /// Bytes beside the elements in each head of a token's K, and of its V.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 0,
            Self::Fp8 => 1,
        }
    }

    /// Bytes that one head of a token takes in K, and as many in V: `head_dim` elements and their scale.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        head_dim * self.size() + self.scale_bytes()
    }

    /// The name used on the command line and on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| format!("unknown KV dtype '{text}': f16, bf16, f32 or fp8"))
    }
}

/// Everything two workers must agree on before one reads the other's KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Digest of the model's weights and configuration.
    pub model_digest: [u8; 32],
    /// Layers that hold KV.
    pub num_layers: usize,
    /// KV heads of a layer.
    pub num_kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Tokens of one block.
    pub block_size: usize,
    /// Element type.
    pub dtype: KvDtype,
    /// Order of elements inside a block, by name. Memories of different arrangements meet in the canonical order.
    pub arrangement: String,
    /// Device, kernel path, KV dtype and weight format; KV is exact only within one id. The device is what stands before the first `-`.
    pub numerics_id: String,
}

impl KvLayout {
    /// Bytes of K and V of one block in one layer.
    pub const fn block_layer_bytes(&self) -> usize {
        2 * self.num_kv_heads * self.block_size * self.dtype.row_bytes(self.head_dim)
    }

    /// Bytes of one block over all layers.
    pub const fn block_bytes(&self) -> usize {
        self.block_layer_bytes() * self.num_layers
    }

    /// Bytes that one token takes over all layers.
    pub const fn token_bytes(&self) -> usize {
        2 * self.num_kv_heads * self.dtype.row_bytes(self.head_dim) * self.num_layers
    }

    /// Blocks that `num_tokens` tokens fill, the last one perhaps partly.
    pub const fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Everything besides tokens that the content of a block depends on, for [`BlockHash::root`](crate::BlockHash::root). The
    /// digest's length is fixed and types have no zero byte in their names, so different layouts never give the same salt.
    pub fn cache_salt(&self) -> Vec<u8> {
        [&self.model_digest[..], self.dtype.name().as_bytes(), &[0], self.numerics_id.as_bytes()].concat()
    }

    /// The device that the numerics id begins with: `cpu`, `cuda.sm90`.
    pub fn device(&self) -> &str {
        self.numerics_id.split('-').next().unwrap_or_default()
    }

    /// The order in which whole blocks go to a memory of the other layout.
    pub fn order_to(&self, other: &Self) -> BlockOrder {
        if self.arrangement == other.arrangement { BlockOrder::Own } else { BlockOrder::Canonical }
    }

    /// Whether KV of `other` can be used here: byte for byte, or in the canonical order if the arrangements differ. Devices of
    /// different kinds round differently whatever they do, so their numerics ids may differ, and an answer of both is not exact; those of
    /// one kind must agree.
    ///
    /// # Errors
    /// The first field that differs, with both values.
    pub fn check(&self, other: &Self) -> Result<(), LayoutMismatch> {
        let hex = |d: &[u8; 32]| d.iter().take(8).map(|b| format!("{b:02x}")).collect::<String>();
        let pairs = [
            ("model_digest", hex(&self.model_digest), hex(&other.model_digest)),
            ("num_layers", self.num_layers.to_string(), other.num_layers.to_string()),
            ("num_kv_heads", self.num_kv_heads.to_string(), other.num_kv_heads.to_string()),
            ("head_dim", self.head_dim.to_string(), other.head_dim.to_string()),
            ("block_size", self.block_size.to_string(), other.block_size.to_string()),
            ("kv_dtype", self.dtype.to_string(), other.dtype.to_string()),
        ];
        let same_device = self.device() == other.device();
        let numerics = ("numerics_id", self.numerics_id.clone(), other.numerics_id.clone());
        for (field, ours, theirs) in pairs.into_iter().chain(same_device.then_some(numerics)) {
            if ours != theirs {
                return Err(LayoutMismatch { field, ours, theirs });
            }
        }
        // The pairs show a prefix of the digest; equality is decided on all of it.
        if self.model_digest != other.model_digest {
            return Err(LayoutMismatch {
                field: "model_digest",
                ours: hex(&self.model_digest),
                theirs: hex(&other.model_digest),
            });
        }
        Ok(())
    }
}

/// Two layouts that can't exchange KV.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV layouts differ in {field}: ours is {ours}, theirs is {theirs}")]
pub struct LayoutMismatch {
    /// The field that differs.
    pub field: &'static str,
    /// This side's value.
    pub ours: String,
    /// The other side's value.
    pub theirs: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smollm() -> KvLayout {
        KvLayout {
            model_digest: [7; 32],
            num_layers: 30,
            num_kv_heads: 3,
            head_dim: 64,
            block_size: 16,
            dtype: KvDtype::F16,
            arrangement: "test".into(),
            numerics_id: "test".into(),
        }
    }

    #[test]
    fn sizes_of_the_default_model() {
        let layout = smollm();
        assert_eq!(layout.token_bytes(), 23_040); // 22.5 KiB
        assert_eq!(layout.block_bytes(), 360 * 1024);
        assert_eq!(layout.blocks_for(0), 0);
        assert_eq!(layout.blocks_for(16), 1);
        assert_eq!(layout.blocks_for(17), 2);
    }

    #[test]
    fn a_token_takes_its_elements_and_their_scales() {
        let bytes = |dtype| KvLayout { dtype, ..smollm() }.token_bytes();
        assert_eq!(KvDtype::ALL.map(bytes), [46_080, 23_040, 23_040, 11_700]);
        for dtype in KvDtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            let layout = KvLayout { dtype, ..smollm() };
            assert_eq!(layout.block_bytes(), 16 * layout.token_bytes());
        }
        let error = "fp4".parse::<KvDtype>().unwrap_err();
        assert_eq!(error, "unknown KV dtype 'fp4': f16, bf16, f32 or fp8");
    }

    #[test]
    fn a_mismatch_names_the_field_and_both_sides() {
        let ours = smollm();
        let theirs = KvLayout { block_size: 32, ..smollm() };
        let error = ours.check(&theirs).unwrap_err();
        assert_eq!(error.to_string(), "KV layouts differ in block_size: ours is 16, theirs is 32");
        let mut digest = [7; 32];
        digest[31] = 8;
        let error = ours.check(&KvLayout { model_digest: digest, ..smollm() }).unwrap_err();
        assert_eq!(error.field, "model_digest");
    }

    #[test]
    fn devices_of_different_kinds_may_differ_in_numerics_and_arrangements_are_mapped() {
        let layout = |numerics: &str, arrangement: &str| KvLayout {
            numerics_id: numerics.into(),
            arrangement: arrangement.into(),
            ..smollm()
        };
        let cpu = layout("cpu-int8-fma/kv-f16/q4_1", "k[head][dim][token] v[head][token][dim]");
        let cuda = layout("cuda.sm90-f16-mma16/kv-f16/q4_1>f16", "kv[head][token][dim]");
        assert_eq!((cpu.device(), cuda.device()), ("cpu", "cuda.sm90"));
        cpu.check(&cuda).unwrap();
        cuda.check(&cpu).unwrap();
        assert_eq!((cpu.order_to(&cuda), cuda.order_to(&cuda)), (BlockOrder::Canonical, BlockOrder::Own));
        let older = layout("cuda.sm80-f16-mma16/kv-f16/q4_1>f16", "kv[head][token][dim]");
        cuda.check(&older).unwrap();
        // One kind of device, other numerics: refused as ever, and so is another element type on any device.
        let other = layout("cuda.sm90-bf16-mma16/kv-f16/q4_1>bf16", "kv[head][token][dim]");
        assert_eq!(cuda.check(&other).unwrap_err().field, "numerics_id");
        let wide = KvLayout { dtype: KvDtype::F32, ..cpu.clone() };
        assert_eq!(cuda.check(&wide).unwrap_err().field, "kv_dtype");
    }

    #[test]
    fn a_salt_tells_apart_whatever_kv_depends_on() {
        let layout = |digest, dtype, numerics: &str| KvLayout {
            model_digest: [digest; 32],
            dtype,
            numerics_id: numerics.into(),
            ..smollm()
        };
        let salts = [
            layout(1, KvDtype::F16, "a").cache_salt(),
            layout(2, KvDtype::F16, "a").cache_salt(),
            layout(1, KvDtype::F32, "a").cache_salt(),
            layout(1, KvDtype::F16, "b").cache_salt(),
        ];
        let different: std::collections::HashSet<_> = salts.iter().collect();
        assert_eq!(different.len(), salts.len());
        assert_eq!(salts[0], layout(1, KvDtype::F16, "a").cache_salt());
    }
}
