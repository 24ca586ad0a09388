// What is done to every element of a row: embedding, normalisation, activation.

template <class T>
DEVICE void embed(float* residual, const T* embedding, const u32* tokens, i32 hidden) {
    REQUIRE(blockDim.x == 256);
    const u64 row = static_cast<u64>(blockIdx.x) * hidden, from = static_cast<u64>(tokens[blockIdx.x]) * hidden;
    for (i32 i = threadIdx.x; i < hidden; i += blockDim.x) residual[row + i] = widen(embedding[from + i]);
}

// Root mean square normalisation (Zhang and Sennrich, 2019) of what the residual stream is after `projected` came in.
template <class T>
DEVICE void add_norm(T* normed, float* residual, const float* projected, const float* weight, const u32* select, i32 hidden, float eps) {
    REQUIRE(blockDim.x == 256);
    SHARED(shared);
    const u64 source = select ? select[blockIdx.x] : blockIdx.x;
    float* x = residual + source * hidden;
    const float* added = projected ? projected + source * hidden : nullptr;
    float squares = 0;
    for (i32 i = threadIdx.x; i < hidden; i += blockDim.x) {
        const float value = added ? sum(x[i], added[i]) : x[i];
        if (added) x[i] = value;
        squares = fused(value, value, squares);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, reinterpret_cast<float*>(shared)) / hidden + eps);
    T* out = normed + static_cast<u64>(blockIdx.x) * hidden;
    // Each thread reads the elements that it wrote.
    for (i32 i = threadIdx.x; i < hidden; i += blockDim.x) put(out + i, product(product(x[i], scale), weight[i]));
}

template <class T>
DEVICE void silu_mul(T* out, const float* gate, const float* up, i32 ffn, i32 in_stride) {
    REQUIRE(blockDim.x == 256);
    const u64 in = static_cast<u64>(blockIdx.x) * in_stride, to = static_cast<u64>(blockIdx.x) * ffn;
    for (i32 n = 0; n < 4; n++) {
        const i32 i = blockIdx.y * 1024 + n * 256 + threadIdx.x;
        if (i >= ffn) return;
        const float x = gate[in + i];
        put(out + to + i, x / (1.0f + expf(-x)) * up[in + i]);
    }
}
