// Copies of whole blocks, and between blocks and staging in canonical order.

struct Sixteen {
    u64 low, high;
};

DEVICE void copy_run(u8* to, const u8* from, u32 bytes) {
    const u32 whole = bytes / 16;
    for (u32 i = threadIdx.x; i < whole; i += blockDim.x) reinterpret_cast<Sixteen*>(to)[i] = reinterpret_cast<const Sixteen*>(from)[i];
}

DEVICE void copy_block(u8* arena, const u32* pairs, i32 num_blocks, i32 block_layer_bytes) {
    REQUIRE(blockDim.x == 256 && block_layer_bytes % 16 == 0);
    const u64 layer = static_cast<u64>(blockIdx.y) * num_blocks;
    const u32 from = pairs[2 * blockIdx.x], to = pairs[2 * blockIdx.x + 1];
    copy_run(arena + (layer + to) * block_layer_bytes, arena + (layer + from) * block_layer_bytes, block_layer_bytes);
}

// A slice of a block: the first tokens of one half of one head, which both orders keep together.
struct Run {
    u64 in_block, in_staging;
    u32 bytes;
};

DEVICE Run run_of(const u32* slices, i32 num_kv_heads, i32 block_size, i32 row_bytes) {
    REQUIRE(blockDim.x == 128 && gridDim.y == static_cast<u32>(2 * num_kv_heads) && row_bytes % 16 == 0);
    const u32* slice = slices + 3 * static_cast<u64>(blockIdx.x);
    REQUIRE(slice[1] >= 1 && slice[1] <= static_cast<u32>(block_size));
    const u64 head = static_cast<u64>(slice[0]) * (2 * num_kv_heads) + blockIdx.y;
    const u32 bytes = slice[1] * row_bytes;
    return Run{head * block_size * row_bytes, slice[2] * u64{16} + static_cast<u64>(blockIdx.y) * bytes, bytes};
}

DEVICE void gather_block(u8* staging, const u8* layer, const u32* slices, i32 num_kv_heads, i32 block_size, i32 row_bytes) {
    const Run run = run_of(slices, num_kv_heads, block_size, row_bytes);
    copy_run(staging + run.in_staging, layer + run.in_block, run.bytes);
}

DEVICE void scatter_block(u8* layer, const u8* staging, const u32* slices, i32 num_kv_heads, i32 block_size, i32 row_bytes) {
    const Run run = run_of(slices, num_kv_heads, block_size, row_bytes);
    copy_run(layer + run.in_block, staging + run.in_staging, run.bytes);
}
