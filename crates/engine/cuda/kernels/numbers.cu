// Rounding and sums that several kernels share.

#define NOTHING (__builtin_inff())

DEVICE void put(f16* to, float x) { to->bits = static_cast<u16>(pack(f16{}, x, 0.0f)); }
DEVICE void put(bf16* to, float x) { to->bits = static_cast<u16>(pack(bf16{}, x, 0.0f)); }

DEVICE int lane_of() { return threadIdx.x % 32; }
DEVICE int warp_of() { return threadIdx.x / 32; }

// The sum over a warp, in every lane; the order is the same in all of them.
template <class V>
DEVICE V warp_sum(V x) {
    for (int mask = 16; mask > 0; mask /= 2) x += exchange(x, mask);
    return x;
}

// The sum over a block of threads, in every thread. `scratch` takes one element a warp, and is free again after the next barrier.
template <class V>
DEVICE V block_sum(V x, V* scratch) {
    x = warp_sum(x);
    if (lane_of() == 0) scratch[warp_of()] = x;
    sync_block();
    V total = 0;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) total += scratch[warp];
    return total;
}
