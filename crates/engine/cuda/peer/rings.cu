// Blocks on their way into a ring in device memory and out of one that another process made, and the sum by which both ends know that they are the same.
// A module of its own, loaded by workers that move KV so.

// A word's weight by its place: splitmix64 (Steele, Lea and Flood, 2014).
DEVICE u64 weight_of(u64 place) {
    u64 z = (place + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Copies, and returns this thread's part of the sum of 32-bit words times their weights, modulo 2^64 (multilinear hashing: Lemire and Kaser, 2014). Volatile: another
// process can change what is read, so it is looked at once, and what is summed is what is written.
DEVICE u64 copy_summed(u8* to, const u8* from, u32 bytes, u64 first_word) {
    const volatile u64* source = reinterpret_cast<const volatile u64*>(from);
    u64 total = 0;
    for (u32 i = threadIdx.x; i < bytes / 8; i += blockDim.x) {
        const u64 both = source[i], word = first_word + 2 * u64{i};
        reinterpret_cast<u64*>(to)[i] = both;
        total += (both & 0xffffffff) * weight_of(word) + (both >> 32) * weight_of(word + 1);
    }
    return total;
}

// A slice of a block: the first tokens of one half of one head. Its place in the ring counts from the payload's first byte.
struct Passage {
    u64 in_block, in_ring;
    u32 bytes;
};

DEVICE Passage passage_of(const u32* slices, i32 num_kv_heads, i32 block_size, i32 row_bytes) {
    REQUIRE(blockDim.x == 128 && gridDim.y == static_cast<u32>(2 * num_kv_heads) && row_bytes % 16 == 0);
    const u32* slice = slices + 3 * static_cast<u64>(blockIdx.x);
    REQUIRE(slice[1] >= 1 && slice[1] <= static_cast<u32>(block_size));
    const u64 head = static_cast<u64>(slice[0]) * (2 * num_kv_heads) + blockIdx.y;
    const u32 bytes = slice[1] * row_bytes;
    return Passage{head * block_size * row_bytes, slice[2] * u64{16} + static_cast<u64>(blockIdx.y) * bytes, bytes};
}

DEVICE void tell_sum(u64* sums, u64 mine) {
    SHARED(shared);
    const u64 total = block_sum(mine, reinterpret_cast<u64*>(shared));
    if (threadIdx.x == 0) sums[static_cast<u64>(blockIdx.x) * gridDim.y + blockIdx.y] = total;
}

extern "C" __global__ void gather_summed(u8* ring, u64* sums, const u8* layer, const u32* slices, i32 num_kv_heads, i32 block_size, i32 row_bytes) {
    const Passage way = passage_of(slices, num_kv_heads, block_size, row_bytes);
    tell_sum(sums, copy_summed(ring + way.in_ring, layer + way.in_block, way.bytes, way.in_ring / 4));
}
EXPORT(gather_summed)

extern "C" __global__ void scatter_summed(u8* layer, u64* sums, const u8* ring, const u32* slices, i32 num_kv_heads, i32 block_size, i32 row_bytes) {
    const Passage way = passage_of(slices, num_kv_heads, block_size, row_bytes);
    tell_sum(sums, copy_summed(layer + way.in_block, ring + way.in_ring, way.bytes, way.in_ring / 4));
}
EXPORT(scatter_summed)
