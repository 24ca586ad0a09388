// What the kernels use of a device, on a CPU: the names of kernels/device.cu.

#include <cmath>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define threadIdx (shim::g.now->thread)
#define blockIdx (shim::g.block_index)
#define blockDim (shim::g.block_dim)
#define gridDim (shim::g.grid_dim)
#define SHARED(name) u8* name = shim::g.shared
#define REQUIRE(condition) \
    if (!(condition)) shim::fault("the launch contradicts ABI.md: " #condition)
#define EXPORT(kernel) static const shim::Registered registered_##kernel(#kernel, &kernel);

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

inline u32 bits_of(float x) {
    u32 out;
    std::memcpy(&out, &x, 4);
    return out;
}

inline float from_bits(u32 x) {
    float out;
    std::memcpy(&out, &x, 4);
    return out;
}

inline float widen(bf16 x) { return from_bits(static_cast<u32>(x.bits) << 16); }

inline float widen(f16 x) {
    const u32 sign = static_cast<u32>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // Exponents differ by 112; multiplying brings subnormals to their place too.
    return from_bits(sign | bits_of(from_bits(magnitude << 13) * from_bits((127 + 112) << 23)));
}

inline u16 narrow(bf16, float x) {
    const u32 bits = bits_of(x);
    if (x != x) return 0x7fff;
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline u16 narrow(f16, float x) {
    const u32 bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (x != x) return 0x7fff;
    if (magnitude >= 0x477ff000) return static_cast<u16>(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        // Subnormal: the sum's last bit is worth 2^-24.
        const float sum = from_bits(magnitude) + 0.5f;
        return static_cast<u16>(sign | (bits_of(sum) - bits_of(0.5f)));
    }
    return static_cast<u16>(sign | (((magnitude - (112u << 23)) + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

template <class T>
u32 pack(T type, float low, float high) {
    return narrow(type, low) | static_cast<u32>(narrow(type, high)) << 16;
}

template <class T>
void widen_four(T type, u32 bytes, u32 (&out)[2]) {
    float x[4];
    for (int n = 0; n < 4; n++) x[n] = static_cast<signed char>(bytes >> (8 * n) & 0xff);
    for (int n = 0; n < 2; n++) out[n] = pack(type, x[2 * n], x[2 * n + 1]);
}

namespace shim {

template <class T>
float half_of_word(u32 word, int half) {
    return widen(T{static_cast<u16>(word >> (16 * half))});
}

struct Operands {
    float c[4];
    u32 a[4], b[2];
};

// Places of a lane's elements as PTX's manual lays out mma.m16n8k16.
template <class T>
void multiply_warp(unsigned char (*in)[SLOT_BYTES], unsigned char (*out)[SLOT_BYTES]) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        Operands o;
        std::memcpy(&o, in[lane], sizeof o);
        const int row = lane / 4, two = lane % 4 * 2;
        for (int n = 0; n < 4; n++)
            for (int h = 0; h < 2; h++) a[row + n % 2 * 8][two + n / 2 * 8 + h] = half_of_word<T>(o.a[n], h);
        for (int n = 0; n < 2; n++)
            for (int h = 0; h < 2; h++) b[two + n * 8 + h][row] = half_of_word<T>(o.b[n], h);
    }
    for (int lane = 0; lane < 32; lane++) {
        Operands o;
        std::memcpy(&o, in[lane], sizeof o);
        for (int n = 0; n < 4; n++) {
            const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
            float sum = o.c[n];
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
            o.c[n] = sum;
        }
        std::memcpy(out[lane], o.c, sizeof o.c);
    }
}

struct Words {
    u32 words[4];
};

inline void load_warp(unsigned char (*in)[SLOT_BYTES], unsigned char (*out)[SLOT_BYTES], bool transposed) {
    u16 matrices[4][8][8];
    for (int lane = 0; lane < 32; lane++) {
        const u8* row;
        std::memcpy(&row, in[lane], sizeof row);
        if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) fault("a row of a matrix that is not aligned to 16 bytes");
        std::memcpy(matrices[lane / 8][lane % 8], row, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
        Words o;
        for (int m = 0; m < 4; m++) {
            const int row = lane / 4, two = lane % 4 * 2;
            const u32 low = transposed ? matrices[m][two][row] : matrices[m][row][two];
            const u32 high = transposed ? matrices[m][two + 1][row] : matrices[m][row][two + 1];
            o.words[m] = low | high << 16;
        }
        std::memcpy(out[lane], &o, sizeof o);
    }
}

template <class V>
struct Request {
    V value;
    int lane;
};

template <class V>
V shuffle(Kind kind, V value, int argument) {
    return with_warp<Request<V>, V>(kind, Request<V>{value, argument}, [kind](auto in, auto out) {
        for (int lane = 0; lane < 32; lane++) {
            Request<V> mine, other;
            std::memcpy(&mine, in[lane], sizeof mine);
            const int from = kind == Kind::EXCHANGE ? lane ^ mine.lane : mine.lane;
            if (from < 0 || from >= 32) fault("a shuffle from beyond the warp");
            std::memcpy(&other, in[from], sizeof other);
            std::memcpy(out[lane], &other.value, sizeof other.value);
        }
    });
}

}  // namespace shim

template <class T>
void multiply(T, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    using Four = shim::Words;
    const shim::Operands in{{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    const Four out = shim::with_warp<shim::Operands, Four>(shim::Kind::MULTIPLY, in, shim::multiply_warp<T>);
    std::memcpy(c, &out, sizeof c);
}

inline void load_matrices_of(u32 (&to)[4], const u8* row, bool transposed) {
    const shim::Kind kind = transposed ? shim::Kind::LOAD_TRANSPOSED : shim::Kind::LOAD;
    const auto out = shim::with_warp<const u8*, shim::Words>(kind, row, [&](auto in, auto out) { shim::load_warp(in, out, transposed); });
    std::memcpy(to, &out, sizeof to);
}

inline void load_matrices(u32 (&out)[4], const u8* row) { load_matrices_of(out, row, false); }
inline void load_matrices_transposed(u32 (&out)[4], const u8* row) { load_matrices_of(out, row, true); }

// The copy is made when it is waited for; until then its place holds NaN.
inline void start_copy(u8* to, const void* from, bool any) {
    if (reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16) shim::fault("a copy that is not aligned to 16 bytes");
    std::memset(to, 0xff, 16);
    shim::g.now->copies.push_back({to, from, any, shim::g.now->groups_ended});
}

inline void end_copies() { shim::g.now->groups_ended++; }

template <int PENDING>
void await_copies() {
    auto& copies = shim::g.now->copies;
    std::size_t kept = 0;
    for (const auto& copy : copies) {
        if (copy.group + PENDING >= shim::g.now->groups_ended) {
            copies[kept++] = copy;
        } else if (copy.any) {
            std::memcpy(copy.to, copy.from, 16);
        } else {
            std::memset(copy.to, 0, 16);
        }
    }
    copies.resize(kept);
}

inline void sync_block() { shim::wait_for_block(); }

inline void sync_warp() {
    shim::with_warp<int, int>(shim::Kind::SYNC, 0, [](auto, auto) {});
}

template <class V>
V exchange(V value, int lane_mask) {
    return shim::shuffle(shim::Kind::EXCHANGE, value, lane_mask);
}

template <class V>
V from_lane(V value, int lane) {
    return shim::shuffle(shim::Kind::FROM_LANE, value, lane);
}

template <class V>
void add_shared(V* to, V value) {
    *to += value;
}

inline float power_of_two(float x) { return std::exp2(x); }
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline float product(float a, float b) { return a * b; }
inline float sum(float a, float b) { return a + b; }
inline int log2_of(u32 power) { return 31 - __builtin_clz(power); }
inline i32 min(i32 a, i32 b) { return a < b ? a : b; }
