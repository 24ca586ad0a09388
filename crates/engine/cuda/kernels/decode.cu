// Split KV: each warp takes one step of a tile of 128 positions, the block merges them; `combine` merges tiles.

template <class T, int D>
DEVICE void attend_decode(float* partials, const T* q, const T* layer, const u32* rows, const u32* items, const u32* blocks, const Shape& shape,
                          i32 capacity) {
    REQUIRE(blockDim.x == 128 && gridDim.y == static_cast<u32>(shape.num_kv_heads));
    SHARED(shared);
    const u32 index = items[2 * blockIdx.x], part = items[2 * blockIdx.x + 1];
    if (index == 0xffffffffu) return;
    const Row row = row_at(rows, index);
    const u32 group = shape.group(), num_queries = row.num_tokens * group, end = row.position + row.num_tokens;
    REQUIRE(num_queries <= static_cast<u32>(capacity) && capacity <= PACKED && blockIdx.x == row.first_item + part && part * TILE < end);
    const u32 first = part * TILE + warp_of() * STEP, lane = lane_of();
    u8* mine = shared + warp_of() * 2 * STEP * padded<D>();
    Sums<D> sums;
    sums.clear();
    if (first < end) {
        u8* values = mine + STEP * padded<D>();
        const u32* table = blocks + row.first_block;
        load_step<T, D>(mine, half_of<T, D>(layer, shape, blockIdx.y, false), table, shape, first, end, lane, 32);
        end_copies();
        load_step<T, D>(values, half_of<T, D>(layer, shape, blockIdx.y, true), table, shape, first, end, lane, 32);
        end_copies();
        Queries<T, D> queries;
        queries.start(q, row, shape, 0, blockIdx.y);
        const u32 limit[2] = {limit_of(row, group, lane / 4), limit_of(row, group, lane / 4 + 8)};
        await_copies<1>();
        sync_warp();
        // Scores are computed while values are on their way.
        attend_step<T, D>(sums, queries, mine, values, first, limit, shape.scale, [] {
            await_copies<0>();
            sync_warp();
        });
        // All lanes have read keys and values: their place takes the sums.
        sync_warp();
    }
    float* out = reinterpret_cast<float*>(mine);
    for (int h = 0; h < 2; h++) {
        float* to = out + (lane / 4 + h * 8) * (D + 2);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            for (int c = 0; c < 2; c++) to[n * 8 + lane % 4 * 2 + c] = sums.acc[n][2 * h + c];
        if (lane % 4 == 0) {
            to[D] = sums.largest[h];
            to[D + 1] = sums.weight[h];
        }
    }
    sync_block();
    float* partial = partials + (static_cast<u64>(blockIdx.x) * shape.num_kv_heads + blockIdx.y) * capacity * (D + 2);
    for (u32 i = threadIdx.x; i < num_queries * D; i += blockDim.x) {
        const u32 r = i / D, d = i % D;
        float acc = 0, largest = -NOTHING, weight = 0;
        for (int step = 0; step < STEPS_OF_A_TILE; step++) {
            const float* from = reinterpret_cast<const float*>(shared + step * 2 * STEP * padded<D>()) + r * (D + 2);
            const Factors factors(largest, from[D]);
            acc = factors.merge(acc, from[d]);
            weight = factors.merge(weight, from[D + 1]);
            largest = factors.largest;
        }
        partial[r * (D + 2) + d] = acc;
        if (d == 0) {
            partial[r * (D + 2) + D] = largest;
            partial[r * (D + 2) + D + 1] = weight;
        }
    }
}

template <class T>
DEVICE void attend_combine(T* out, const float* partials, const u32* rows, i32 num_heads, i32 num_kv_heads, i32 head_dim, i32 capacity) {
    REQUIRE(blockDim.x == 128 && gridDim.y == static_cast<u32>(num_kv_heads) && gridDim.z == static_cast<u32>(capacity));
    const Row row = row_at(rows, blockIdx.x);
    const u32 group = num_heads / num_kv_heads, r = blockIdx.z;
    if (r >= row.num_tokens * group) return;
    const u32 tiles = (row.position + row.num_tokens + TILE - 1) / TILE;
    const u64 stride = static_cast<u64>(num_kv_heads) * capacity * (head_dim + 2);
    const float* first = partials + row.first_item * stride + (static_cast<u64>(blockIdx.y) * capacity + r) * (head_dim + 2);
    const u64 token = row.first_token + r / group;
    T* to = out + (token * num_heads + blockIdx.y * group + r % group) * head_dim;
    for (i32 d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float acc = 0, largest = -NOTHING, weight = 0;
        for (u32 tile = 0; tile < tiles; tile++) {
            const float* from = first + tile * stride;
            const Factors factors(largest, from[head_dim]);
            acc = factors.merge(acc, from[d]);
            weight = factors.merge(weight, from[head_dim + 1]);
            largest = factors.largest;
        }
        put(to + d, product(acc, 1.0f / weight));
    }
}
