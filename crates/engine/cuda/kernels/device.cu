// What the kernels use of a device, for nvcc. shim/device.h gives a CPU the same names; nothing else in this folder names an instruction.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

#define DEVICE __device__ __forceinline__
#define SHARED(name) extern __shared__ __align__(16) u8 name[]
// A launch that contradicts ABI.md: checked under the shim alone.
#define REQUIRE(condition)
#define EXPORT(kernel)

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

DEVICE float widen(f16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
}

DEVICE float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

// Two floats rounded to nearest even; `low` in the lower half.
DEVICE u32 pack(f16, float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

DEVICE u32 pack(bf16, float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// Four signed bytes, lowest first, each exact.
DEVICE void widen_four(f16, u32 bytes, u32 (&out)[2]) {
    // 0x6400 + b is the f16 1024 + b, for every byte b; bytes are biased by 128 so that none is negative.
    const u32 biased = bytes ^ 0x80808080u;
    for (int n = 0; n < 2; n++) {
        u32 two;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(two) : "r"(biased), "r"(0x64646464u), "r"(n == 0 ? 0x4140u : 0x4342u));
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out[n]) : "r"(two), "r"(0x64806480u));
    }
}

DEVICE void widen_four(bf16, u32 bytes, u32 (&out)[2]) {
    // 0x4b000000 + b is the float 2^23 + b.
    const u32 biased = bytes ^ 0x80808080u;
    float x[4];
    for (int n = 0; n < 4; n++) {
        u32 one;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(one) : "r"(biased), "r"(0x4b000000u), "r"(0x7440u + n));
        x[n] = __uint_as_float(one) - 8388736.0f;
    }
    out[0] = pack(bf16{}, x[0], x[1]);
    out[1] = pack(bf16{}, x[2], x[3]);
}

// c += a * b: a is 16 x 16, b 16 x 8, c 16 x 8, spread over a warp as PTX lays out mma.m16n8k16.
DEVICE void multiply(f16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply(bf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// Four 8 x 8 matrices of 16-bit elements; lane 8 m + r brings the address of row r of matrix m.
DEVICE void load_matrices(u32 (&out)[4], const u8* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, transposed.
DEVICE void load_matrices_transposed(u32 (&out)[4], const u8* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts a copy of 16 bytes to shared memory, of zeros if there is nothing to copy; `from` must be readable memory's address all the same.
DEVICE void start_copy(u8* to, const void* from, bool any) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(any ? 16 : 0)
                 : "memory");
}

// Ends a group of copies.
DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of this thread's groups are under way.
template <int PENDING>
DEVICE void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

template <class V>
DEVICE V exchange(V value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

template <class V>
DEVICE V from_lane(V value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

template <class V>
DEVICE void add_shared(V* to, V value) {
    atomicAdd(to, value);
}

DEVICE float power_of_two(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
DEVICE float sum(float a, float b) { return __fadd_rn(a, b); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float from_bits(u32 x) { return __uint_as_float(x); }
DEVICE int log2_of(u32 power) { return 31 - __clz(power); }
