// 64 packed queries, 16 a warp, against all positions that they see: steps pass through shared memory, the next one is copied while one is computed.

template <class T, int D>
DEVICE void load_both(u8* stage, const T* layer, const u32* blocks, u32 first_block, const Shape& shape, u32 first, u32 end) {
    load_step<T, D>(stage, half_of<T, D>(layer, shape, blockIdx.y, false), blocks + first_block, shape, first, end, threadIdx.x, 128);
    load_step<T, D>(stage + STEP * padded<D>(), half_of<T, D>(layer, shape, blockIdx.y, true), blocks + first_block, shape, first, end, threadIdx.x, 128);
}

// Merges a tile into the thread's own floats of shared memory, 128 apart, and clears it.
template <int D>
DEVICE void merge_tile(float* total, float (&largest)[2], float (&weight)[2], Sums<D>& tile) {
    const Factors factors[2] = {Factors(largest[0], tile.largest[0]), Factors(largest[1], tile.largest[1])};
    for (int h = 0; h < 2; h++) {
        largest[h] = factors[h].largest;
        weight[h] = factors[h].merge(weight[h], tile.weight[h]);
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        for (int c = 0; c < 4; c++) {
            float* to = total + (n * 4 + c) * 128;
            *to = factors[c / 2].merge(*to, tile.acc[n][c]);
        }
    tile.clear();
}

// Looks at its row again, which is cheaper than to keep it in registers.
template <class T, int D>
DEVICE void write_out(T* out, const float* total, const float (&weight)[2], const Row& row, const Shape& shape, u32 part) {
    const u32 group = shape.group(), lane = lane_of();
    for (int h = 0; h < 2; h++) {
        const u32 r = part * 64 + warp_of() * PACKED + lane / 4 + h * 8;
        if (r >= row.num_tokens * group) continue;
        const u64 token = row.first_token + r / group;
        T* to = out + (token * shape.num_heads + blockIdx.y * group + r % group) * D;
        const float share = 1.0f / weight[h];
        for (int n = 0; n < D / 8; n++)
            for (int c = 0; c < 2; c++) put(to + n * 8 + lane % 4 * 2 + c, product(total[(n * 4 + 2 * h + c) * 128], share));
    }
}

template <class T, int D>
DEVICE void attend_prefill(T* out, const T* q, const T* layer, const u32* rows, const u32* items, const u32* blocks, const Shape& shape) {
    REQUIRE(blockDim.x == 128 && gridDim.y == static_cast<u32>(shape.num_kv_heads));
    SHARED(shared);
    const u32 index = items[2 * blockIdx.x], part = items[2 * blockIdx.x + 1];
    if (index == 0xffffffffu) return;
    const Row row = row_at(rows, index);
    const u32 group = shape.group(), num_queries = row.num_tokens * group, lane = lane_of();
    REQUIRE(part * 64 < num_queries);
    // What the last packed query of the block sees.
    const u32 last = part * 64 + 63 < num_queries ? part * 64 + 63 : num_queries - 1;
    const u32 end = limit_of(row, group, last), num_steps = (end + STEP - 1) / STEP;
    const u32 mine = part * 64 + warp_of() * PACKED + lane / 4;
    const u32 limit[2] = {limit_of(row, group, mine), limit_of(row, group, mine + 8)};
    const int stage_bytes = 2 * STEP * padded<D>();
    float* total = reinterpret_cast<float*>(shared + 2 * stage_bytes) + threadIdx.x;
    for (int i = 0; i < D / 2; i++) total[i * 128] = 0;
    float largest[2] = {-NOTHING, -NOTHING}, weight[2] = {0, 0};
    Queries<T, D> queries;
    queries.start(q, row, shape, part * 64 + warp_of() * PACKED, blockIdx.y);
    Sums<D> tile;
    tile.clear();
    load_both<T, D>(shared, layer, blocks, row.first_block, shape, 0, end);
    end_copies();
    for (u32 step = 0; step < num_steps; step++) {
        u8* stage = shared + step % 2 * stage_bytes;
        if (step + 1 < num_steps) load_both<T, D>(shared + (step + 1) % 2 * stage_bytes, layer, blocks, row.first_block, shape, (step + 1) * STEP, end);
        end_copies();
        await_copies<1>();
        // Every thread's copies of this step have arrived.
        sync_block();
        attend_step<T, D>(tile, queries, stage, stage + STEP * padded<D>(), step * STEP, limit, shape.scale, [] {});
        if (step % STEPS_OF_A_TILE == STEPS_OF_A_TILE - 1 || step + 1 == num_steps) merge_tile<D>(total, largest, weight, tile);
        // Every warp has read this step before the one after next takes its place.
        sync_block();
    }
    write_out<T, D>(out, total, weight, row_at(rows, items[2 * blockIdx.x]), shape, items[2 * blockIdx.x + 1]);
}
