// The kernels by name, as in ABI.md.

#define ENTRY(name) extern "C" __global__ void name
// Threads of a block, and blocks that a multiprocessor should hold at least.
#define BOUNDED(threads, blocks) __launch_bounds__(threads, blocks)

#define ROWS_OF(T)                                                                                                                      \
    ENTRY(embed_##T)(float* residual, const T* embedding, const u32* tokens, i32 hidden) { embed(residual, embedding, tokens, hidden); } \
    EXPORT(embed_##T)                                                                                                                   \
    ENTRY(add_norm_##T)(T * normed, float* residual, const float* projected, const float* weight, const u32* select, i32 hidden,        \
                        float eps) {                                                                                                    \
        add_norm(normed, residual, projected, weight, select, hidden, eps);                                                             \
    }                                                                                                                                   \
    EXPORT(add_norm_##T)                                                                                                                \
    ENTRY(silu_mul_##T)(T * out, const float* gate, const float* up, i32 ffn, i32 in_stride) { silu_mul(out, gate, up, ffn, in_stride); } \
    EXPORT(silu_mul_##T)                                                                                                                \
    ENTRY(rope_kv_##T)(T * q, T * layer, const float* qkv, const float* bias, const float* q_norm, const float* k_norm,                 \
                       const float* turns, const u32* positions, const u32* slots, i32 num_heads, i32 num_kv_heads, i32 head_dim,       \
                       i32 block_size, i32 interleaved, float eps) {                                                                    \
        const Heads heads{num_heads, num_kv_heads, head_dim, block_size, interleaved, eps};                                             \
        rope_kv(q, layer, qkv, bias, q_norm, k_norm, turns, positions, slots, heads);                                                   \
    }                                                                                                                                   \
    EXPORT(rope_kv_##T)                                                                                                                 \
    ENTRY(attend_combine_##T)(T * out, const float* partials, const u32* rows, i32 num_heads, i32 num_kv_heads, i32 head_dim,           \
                              i32 capacity) {                                                                                           \
        attend_combine(out, partials, rows, num_heads, num_kv_heads, head_dim, capacity);                                               \
    }                                                                                                                                   \
    EXPORT(attend_combine_##T)

// Scores in units of log 2, so that their exponential is a power of two.
#define LOG2_E 1.44269504088896340736f

#define ATTENTION_OF(T, D)                                                                                                              \
    ENTRY(BOUNDED(128, 1) attend_decode_##T##_d##D)(float* partials, const T* q, const T* layer, const u32* rows, const u32* items,     \
                                                    const u32* blocks, i32 num_heads, i32 num_kv_heads, i32 block_size, i32 capacity,   \
                                                    float scale) {                                                                      \
        const Shape shape{num_heads, num_kv_heads, block_size, scale * LOG2_E};                                                         \
        attend_decode<T, D>(partials, q, layer, rows, items, blocks, shape, capacity);                                                  \
    }                                                                                                                                   \
    EXPORT(attend_decode_##T##_d##D)                                                                                                    \
    ENTRY(BOUNDED(128, D <= 64 ? 3 : 1) attend_prefill_##T##_d##D)(T * out, const T* q, const T* layer, const u32* rows, const u32* items,            \
                                                     const u32* blocks, i32 num_heads, i32 num_kv_heads, i32 block_size, float scale) { \
        const Shape shape{num_heads, num_kv_heads, block_size, scale * LOG2_E};                                                         \
        attend_prefill<T, D>(out, q, layer, rows, items, blocks, shape);                                                                \
    }                                                                                                                                   \
    EXPORT(attend_prefill_##T##_d##D)

ROWS_OF(f16)
ROWS_OF(bf16)
ATTENTION_OF(f16, 16)
ATTENTION_OF(f16, 32)
ATTENTION_OF(f16, 64)
ATTENTION_OF(f16, 96)
ATTENTION_OF(f16, 128)
ATTENTION_OF(f16, 256)
ATTENTION_OF(bf16, 16)
ATTENTION_OF(bf16, 32)
ATTENTION_OF(bf16, 64)
ATTENTION_OF(bf16, 96)
ATTENTION_OF(bf16, 128)
ATTENTION_OF(bf16, 256)

// 16 M rows and 8 N outputs to a block of threads.
#define INT8_OF(T, ROWS, M, N)                                                                                                          \
    ENTRY(BOUNDED(128, M <= 2 ? 4 : 2) multiply_int8_##T##_m##ROWS)(float* out, const T* x, const u8* quants, const float* scales,      \
                                                                    i32 num_rows, i32 outputs, i32 inputs, i32 stride) {                \
        const Int8Shape shape{num_rows, outputs, inputs, stride};                                                                       \
        multiply_int8<T, M, N>(out, x, quants, scales, shape);                                                                          \
    }                                                                                                                                   \
    EXPORT(multiply_int8_##T##_m##ROWS)

INT8_OF(f16, 16, 1, 4)
INT8_OF(f16, 32, 2, 4)
INT8_OF(f16, 64, 4, 8)
INT8_OF(bf16, 16, 1, 4)
INT8_OF(bf16, 32, 2, 4)
INT8_OF(bf16, 64, 4, 8)

ENTRY(embed_int8)(float* residual, const u8* quants, const float* scales, const u32* tokens, i32 hidden, i32 stride) {
    embed_int8_row(residual, quants, scales, tokens, hidden, stride);
}
EXPORT(embed_int8)

ENTRY(sample)(u32* tokens, float* logprobs, float* weights, const float* logits, const Sampling* samplings, i32 vocab, i32 logits_stride) {
    draw(tokens, logprobs, weights, logits, samplings, vocab, logits_stride);
}
EXPORT(sample)

ENTRY(copy_blocks)(u8* arena, const u32* pairs, i32 num_blocks, i32 block_layer_bytes) { copy_block(arena, pairs, num_blocks, block_layer_bytes); }
EXPORT(copy_blocks)

ENTRY(gather_blocks)(u8* staging, const u8* layer, const u32* slices, i32 num_kv_heads, i32 block_size, i32 row_bytes) {
    gather_block(staging, layer, slices, num_kv_heads, block_size, row_bytes);
}
EXPORT(gather_blocks)

ENTRY(scatter_blocks)(u8* layer, const u8* staging, const u32* slices, i32 num_kv_heads, i32 block_size, i32 row_bytes) {
    scatter_block(layer, staging, slices, num_kv_heads, block_size, row_bytes);
}
EXPORT(scatter_blocks)
