// Products with weights of 8 bits: an integer an element, a scale an output. The integers are exact in both 16-bit types, so they meet activations in the same
// instruction as 16-bit weights would, and the scale comes last.

// Inputs that a warp takes at a time. Warps take pieces in turn, so a warp's sum goes over every fourth of them.
#define PIECE 32
#define STRETCH (4 * PIECE)

struct Int8Shape {
    i32 num_rows, outputs, inputs, stride;
};

// A block's share of the result: 16 M rows by 8 N outputs. How many rows that are decides no bit.
template <int M, int N>
struct Share {
    static constexpr int ROWS = 16 * M, OUTPUTS = 8 * N;
    // Bytes of a stretch of one row in shared memory: 16 more than it has, so that eight rows lie in different banks.
    static constexpr int X_PITCH = 2 * STRETCH + 16, QUANTS_PITCH = STRETCH + 16;
    static constexpr int STAGE_BYTES = ROWS * X_PITCH + OUTPUTS * QUANTS_PITCH;
    static constexpr int STAGES = M == 1 ? 4 : 3;
};

// Starts the copies of inputs `first` to `first + 127` of the block's rows and outputs; zeros where there are none.
template <class T, int M, int N>
DEVICE void load_stretch(u8* stage, const T* x, const u8* quants, const Int8Shape& shape, u32 first) {
    using S = Share<M, N>;
    for (u32 i = threadIdx.x; i < S::ROWS * (STRETCH / 8); i += 128) {
        const u32 nth = i / (STRETCH / 8), chunk = i % (STRETCH / 8), row = blockIdx.y * S::ROWS + nth, k = first + chunk * 8;
        const bool any = row < static_cast<u32>(shape.num_rows) && k < static_cast<u32>(shape.inputs);
        start_copy(stage + nth * S::X_PITCH + chunk * 16, any ? x + static_cast<u64>(row) * shape.inputs + k : x, any);
    }
    u8* to = stage + S::ROWS * S::X_PITCH;
    for (u32 i = threadIdx.x; i < S::OUTPUTS * (STRETCH / 16); i += 128) {
        const u32 nth = i / (STRETCH / 16), chunk = i % (STRETCH / 16), output = blockIdx.x * S::OUTPUTS + nth, k = first + chunk * 16;
        const bool any = output < static_cast<u32>(shape.outputs) && k < static_cast<u32>(shape.stride);
        start_copy(to + nth * S::QUANTS_PITCH + chunk * 16, any ? quants + static_cast<u64>(output) * shape.stride + k : quants, any);
    }
}

// Adds this warp's piece of a stretch to its sums.
template <class T, int M, int N>
DEVICE void add_piece(float (&sums)[M][N][4], const u8* stage) {
    using S = Share<M, N>;
    const int lane = lane_of();
    const u8* x = stage + lane % 16 * S::X_PITCH + lane / 16 * 16 + warp_of() * PIECE * 2;
    const u8* from = stage + S::ROWS * S::X_PITCH + (lane / 16 * 8 + lane % 8) * S::QUANTS_PITCH + lane / 8 % 2 * 16 + warp_of() * PIECE;
    // A lane's four integers of 16 inputs lie together: of two groups of eight outputs, and of both halves of the piece.
    u32 quants[N / 2][4];
#pragma unroll
    for (int n = 0; n < N / 2; n++) load_matrices(quants[n], from + n * 16 * S::QUANTS_PITCH);
#pragma unroll
    for (int k = 0; k < PIECE / 16; k++) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(a[m], x + m * 16 * S::X_PITCH + k * 32);
#pragma unroll
        for (int n = 0; n < N; n++) {
            u32 b[2];
            widen_four(T{}, quants[n / 2][n % 2 * 2 + k], b);
#pragma unroll
            for (int m = 0; m < M; m++) multiply(T{}, sums[m][n], a[m], b[0], b[1]);
        }
    }
}

// Adds the warps' sums in ascending order, and writes them scaled.
template <int M, int N>
DEVICE void merge_warps(float* out, u8* shared, const float (&sums)[M][N][4], const float* scales, const Int8Shape& shape) {
    using S = Share<M, N>;
    constexpr int ALL = S::ROWS * S::OUTPUTS;
    float* all = reinterpret_cast<float*>(shared);
    const int lane = lane_of();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                all[warp_of() * ALL + (m * 16 + lane / 4 + c / 2 * 8) * S::OUTPUTS + n * 8 + lane % 4 * 2 + c % 2] = sums[m][n][c];
    sync_block();
    for (u32 i = threadIdx.x; i < ALL; i += 128) {
        const u32 row = blockIdx.y * S::ROWS + i / S::OUTPUTS, output = blockIdx.x * S::OUTPUTS + i % S::OUTPUTS;
        if (row >= static_cast<u32>(shape.num_rows) || output >= static_cast<u32>(shape.outputs)) continue;
        float total = all[i];
        for (int warp = 1; warp < 4; warp++) total = sum(total, all[warp * ALL + i]);
        out[static_cast<u64>(row) * shape.outputs + output] = product(total, scales[output]);
    }
}

template <class T, int M, int N>
DEVICE void multiply_int8(float* out, const T* x, const u8* quants, const float* scales, const Int8Shape& shape) {
    using S = Share<M, N>;
    REQUIRE(blockDim.x == 128 && shape.inputs % 8 == 0 && shape.stride % 16 == 0 && shape.stride >= shape.inputs);
    REQUIRE(gridDim.x == static_cast<u32>(shape.outputs + S::OUTPUTS - 1) / S::OUTPUTS && gridDim.y == static_cast<u32>(shape.num_rows + S::ROWS - 1) / S::ROWS);
    SHARED(shared);
    const u32 num_stretches = (shape.stride + STRETCH - 1) / STRETCH;
    float sums[M][N][4] = {};
    for (u32 s = 0; s < S::STAGES - 1; s++) {
        if (s < num_stretches) load_stretch<T, M, N>(shared + s * S::STAGE_BYTES, x, quants, shape, s * STRETCH);
        end_copies();
    }
    for (u32 s = 0; s < num_stretches; s++) {
        await_copies<S::STAGES - 2>();
        // Every thread's copies of this stretch have arrived, and every warp is past the one whose place is copied over now.
        sync_block();
        const u32 next = s + S::STAGES - 1;
        if (next < num_stretches) load_stretch<T, M, N>(shared + next % S::STAGES * S::STAGE_BYTES, x, quants, shape, next * STRETCH);
        end_copies();
        add_piece<T, M, N>(sums, shared + s % S::STAGES * S::STAGE_BYTES);
    }
    // Stages are behind every warp: their place takes the sums.
    sync_block();
    merge_warps<M, N>(out, shared, sums, scales, shape);
}

// Row `tokens[t]` of a matrix of 8 bits, widened.
DEVICE void embed_int8_row(float* residual, const u8* quants, const float* scales, const u32* tokens, i32 hidden, i32 stride) {
    REQUIRE(blockDim.x == 256 && stride % 16 == 0 && stride >= hidden);
    const u64 row = static_cast<u64>(blockIdx.x) * hidden, from = static_cast<u64>(tokens[blockIdx.x]) * stride;
    const float scale = scales[tokens[blockIdx.x]];
    for (i32 i = threadIdx.x; i < hidden; i += blockDim.x) {
        // Where element i of its 16 is: see ABI.md.
        const i32 place = i / 16 * 16 + i % 8 / 2 * 4 + i % 2 + i / 8 % 2 * 2;
        residual[row + i] = product(static_cast<float>(static_cast<signed char>(quants[from + place])), scale);
    }
}
