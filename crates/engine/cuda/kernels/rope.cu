// From a row of q, k and v to turned queries and a token's place in the arena (rotary embedding: Su et al., 2021).

struct Heads {
    i32 num_heads, num_kv_heads, head_dim, block_size, interleaved;
    float eps;
};

// A warp's share of one head: up to 4 pairs a lane.
template <class T>
DEVICE void turn_head(T* out, const float* in, const float* bias, const float* norm, const float* turns, const Heads& h) {
    const i32 half = h.head_dim / 2;
    float a[4], b[4], squares = 0;
    for (i32 n = 0; n < 4; n++) {
        const i32 pair = n * 32 + lane_of();
        if (pair >= half) continue;
        const i32 i = h.interleaved ? 2 * pair : pair, j = h.interleaved ? i + 1 : pair + half;
        a[n] = bias ? sum(in[i], bias[i]) : in[i];
        b[n] = bias ? sum(in[j], bias[j]) : in[j];
        squares = fused(a[n], a[n], fused(b[n], b[n], squares));
    }
    const float scale = norm ? 1.0f / sqrtf(warp_sum(squares) / h.head_dim + h.eps) : 1.0f;
    for (i32 n = 0; n < 4; n++) {
        const i32 pair = n * 32 + lane_of();
        if (pair >= half) continue;
        const i32 i = h.interleaved ? 2 * pair : pair, j = h.interleaved ? i + 1 : pair + half;
        const float x = norm ? product(product(a[n], scale), norm[i]) : a[n];
        const float y = norm ? product(product(b[n], scale), norm[j]) : b[n];
        // Values have no turns.
        const float cos = turns ? turns[pair] : 1.0f, sin = turns ? turns[half + pair] : 0.0f;
        put(out + i, fused(x, cos, -product(y, sin)));
        put(out + j, fused(x, sin, product(y, cos)));
    }
}

template <class T>
DEVICE void rope_kv(T* q, T* layer, const float* qkv, const float* bias, const float* q_norm, const float* k_norm, const float* turns,
                    const u32* positions, const u32* slots, const Heads& h) {
    REQUIRE(blockDim.x == 256 && h.head_dim <= 256 && h.head_dim % 2 == 0);
    REQUIRE(gridDim.y == static_cast<u32>(h.num_heads + 2 * h.num_kv_heads + 7) / 8);
    const i32 all = h.num_heads + 2 * h.num_kv_heads, head = blockIdx.y * 8 + warp_of();
    if (head >= all) return;
    const u64 token = blockIdx.x;
    const float* in = qkv + (token * all + head) * h.head_dim;
    const float* head_bias = bias ? bias + head * h.head_dim : nullptr;
    const float* turn = turns + static_cast<u64>(positions[token]) * h.head_dim;
    if (head < h.num_heads) {
        turn_head(q + (token * h.num_heads + head) * h.head_dim, in, head_bias, q_norm, turn, h);
        return;
    }
    const u32 slot = slots[token];
    if (slot == 0xffffffffu) return;
    const i32 nth = head - h.num_heads;
    const bool is_key = nth < h.num_kv_heads;
    // A block holds its keys, head by head, then its values: `nth` counts through both.
    const u64 block = static_cast<u64>(slot / h.block_size) * (2 * h.num_kv_heads) + nth;
    T* to = layer + (block * h.block_size + slot % h.block_size) * h.head_dim;
    turn_head(to, in, head_bias, is_key ? k_norm : nullptr, is_key ? turn : nullptr, h);
}
