// Attention of 16 packed queries over a step of 32 positions, and how sums are merged. Decode and prefill are built of this, so that they give the same bits.

#define STEP 32
#define TILE 128
#define STEPS_OF_A_TILE 4
#define PACKED 16

// Bytes of one key or value in shared memory: 16 more than it has, so that eight rows lie in different banks.
template <int D>
DEVICE constexpr int padded() {
    return 2 * D + 16;
}

// One sequence of the step, as in ABI.md.
struct Row {
    u32 first_token, num_tokens, position, first_block, first_item;
};

struct Shape {
    i32 num_heads, num_kv_heads, block_size;
    // Of scores in units of log 2.
    float scale;
    DEVICE i32 group() const { return num_heads / num_kv_heads; }
};

DEVICE Row row_at(const u32* rows, u32 index) {
    const u32* r = rows + 5 * static_cast<u64>(index);
    return Row{r[0], r[1], r[2], r[3], r[4]};
}

// Largest score, sum of weights and weighted sum of V, for the packed queries lane / 4 and lane / 4 + 8 of a warp.
template <int D>
struct Sums {
    float acc[D / 8][4];
    float largest[2], weight[2];

    DEVICE void clear() {
        for (int h = 0; h < 2; h++) {
            largest[h] = -NOTHING;
            weight[h] = 0;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            for (int c = 0; c < 4; c++) acc[n][c] = 0;
    }
};

// What sums so far and new sums are multiplied by when they are merged. Sums of nothing have the largest score -inf and count 0.
struct Factors {
    float largest, keep, add;

    DEVICE Factors(float so_far, float more) {
        largest = fmaxf(so_far, more);
        keep = so_far == -NOTHING ? 0.0f : power_of_two(so_far - largest);
        add = more == -NOTHING ? 0.0f : power_of_two(more - largest);
    }
    DEVICE float merge(float so_far, float more) const { return fused(so_far, keep, product(more, add)); }
};

// The packed queries of a warp as operands of a matrix product. Heads of 256 are read again at each use: they would take half of the registers.
template <class T, int D>
struct Queries {
    const T* q;
    // Where the thread's two queries start, 0xffffffff for none.
    u32 starts[2];
    u32 kept[D <= 128 ? D / 16 : 1][4];

    DEVICE u32 two(int half, int dim) const {
        return starts[half] == 0xffffffffu ? 0u : *reinterpret_cast<const u32*>(q + starts[half] + dim);
    }

    DEVICE void read(int k, u32 (&out)[4]) const {
        const int dim = k * 16 + lane_of() % 4 * 2;
        out[0] = two(0, dim);
        out[1] = two(1, dim);
        out[2] = two(0, dim + 8);
        out[3] = two(1, dim + 8);
    }

    // `first` is the warp's first packed query of `row` and `kv_head`.
    DEVICE void start(const T* all, const Row& row, const Shape& shape, u32 first, u32 kv_head) {
        const u32 group = shape.group();
        q = all;
        for (int half = 0; half < 2; half++) {
            const u32 r = first + half * 8 + lane_of() / 4;
            const u32 head = (row.first_token + r / group) * shape.num_heads + kv_head * group + r % group;
            starts[half] = r < row.num_tokens * group ? head * D : 0xffffffffu;
        }
        if constexpr (D <= 128) {
#pragma unroll
            for (int k = 0; k < D / 16; k++) read(k, kept[k]);
        }
    }

    DEVICE void get(int k, u32 (&out)[4]) const {
        if constexpr (D <= 128) {
            for (int n = 0; n < 4; n++) out[n] = kept[k][n];
        } else {
            read(k, out);
        }
    }
};

// Starts copying a step of one half of a KV head (K, or V) to shared memory; positions from `end` on become zeros, whatever memory holds.
template <class T, int D>
DEVICE void load_step(u8* to, const T* half, const u32* blocks, const Shape& shape, u32 first, u32 end, u32 member, u32 members) {
    const int shift = log2_of(shape.block_size);
    const u64 block_elements = static_cast<u64>(2 * shape.num_kv_heads) * shape.block_size * D;
    // Addresses of several copies at once would take registers that sums need.
#pragma unroll 1
    for (u32 i = member; i < STEP * (D / 8); i += members) {
        const u32 nth = i / (D / 8), chunk = i % (D / 8), position = first + nth;
        const bool any = position < end;
        const T* from = half;
        if (any) from += blocks[position >> shift] * block_elements + (position & (shape.block_size - 1)) * D + chunk * 8;
        start_copy(to + nth * padded<D>() + chunk * 16, from, any);
    }
}

// One half of a KV head in block 0.
template <class T, int D>
DEVICE const T* half_of(const T* layer, const Shape& shape, u32 kv_head, bool values) {
    const u64 nth = kv_head + (values ? shape.num_kv_heads : 0);
    return layer + nth * shape.block_size * D;
}

// Scores of a step: s[n] holds keys 8 n to 8 n + 7.
template <class T, int D>
DEVICE void scores(float (&s)[4][4], const Queries<T, D>& queries, const u8* keys) {
    const int lane = lane_of();
    const u8* row = keys + (lane % 8 + lane / 16 * 8) * padded<D>() + lane / 8 % 2 * 16;
    // Queries that are not kept would otherwise all be read ahead, into registers that there are not.
#pragma unroll (D <= 128 ? D / 16 : 4)
    for (int k = 0; k < D / 16; k++) {
        u32 a[4];
        queries.get(k, a);
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            u32 b[4];
            load_matrices(b, row + n * 8 * padded<D>() + k * 32);
            multiply(T{}, s[n], a, b[0], b[1]);
            multiply(T{}, s[n + 1], a, b[2], b[3]);
        }
    }
}

// Merges one step into `sums`. A query sees positions below its `limit`; `first` is the step's first. Values are looked at after `await_values`.
template <class T, int D, class Await>
DEVICE void attend_step(Sums<D>& sums, const Queries<T, D>& queries, const u8* keys, const u8* values, u32 first, const u32 (&limit)[2],
                        float scale, const Await& await_values) {
    const int lane = lane_of();
    float s[4][4] = {};
    scores<T, D>(s, queries, keys);
    float largest[2] = {-NOTHING, -NOTHING}, weight[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 4; n++)
        for (int c = 0; c < 4; c++) {
            const u32 position = first + n * 8 + lane % 4 * 2 + c % 2;
            s[n][c] = position < limit[c / 2] ? product(s[n][c], scale) : -NOTHING;
            largest[c / 2] = fmaxf(largest[c / 2], s[n][c]);
        }
    for (int h = 0; h < 2; h++) {
        largest[h] = fmaxf(largest[h], exchange(largest[h], 1));
        largest[h] = fmaxf(largest[h], exchange(largest[h], 2));
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
        for (int c = 0; c < 4; c++) {
            s[n][c] = s[n][c] == -NOTHING ? 0.0f : power_of_two(s[n][c] - largest[c / 2]);
            weight[c / 2] = sum(weight[c / 2], s[n][c]);
        }
    for (int h = 0; h < 2; h++) {
        weight[h] = sum(weight[h], exchange(weight[h], 1));
        weight[h] = sum(weight[h], exchange(weight[h], 2));
    }
    const Factors factors[2] = {Factors(sums.largest[0], largest[0]), Factors(sums.largest[1], largest[1])};
    for (int h = 0; h < 2; h++) {
        sums.largest[h] = factors[h].largest;
        sums.weight[h] = factors[h].merge(sums.weight[h], weight[h]);
    }
    u32 p[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++)
        for (int c = 0; c < 4; c++) p[j][c] = pack(T{}, s[2 * j + c / 2][c % 2 * 2], s[2 * j + c / 2][c % 2 * 2 + 1]);
    await_values();
    const u8* row = values + lane % 16 * padded<D>() + lane / 16 * 16;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
        float out[2][4] = {};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 b[4];
            load_matrices_transposed(b, row + j * 16 * padded<D>() + d * 32);
            multiply(T{}, out[0], p[j], b[0], b[1]);
            multiply(T{}, out[1], p[j], b[2], b[3]);
        }
        for (int n = 0; n < 2; n++)
            for (int c = 0; c < 4; c++)
                sums.acc[2 * d + n][c] = factors[c / 2].merge(sums.acc[2 * d + n][c], out[n][c]);
    }
}

// How many positions packed query `r` of a row sees.
DEVICE u32 limit_of(const Row& row, u32 group, u32 r) {
    return r < row.num_tokens * group ? row.position + r / group + 1 : 0;
}
