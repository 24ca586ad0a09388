// libcublasLt for tests: products of 16-bit matrices into f32, as Baton asks for them, on the device of device.h.

#include "device.h"

#include <cstring>
#include <vector>

namespace {

constexpr int OK = 0, INVALID = 7, UNSUPPORTED = 15;
constexpr int R_32F = 0, R_16F = 2, R_16BF = 14;

struct Matrix {
    int type;
    uint64_t rows, cols;
    int64_t ld;
    size_t bytes() const { return (cols - 1) * ld * (type == R_32F ? 4 : 2) + rows * (type == R_32F ? 4 : 2); }
};

struct Product {
    int transposed_a = 0, transposed_b = 0;
};

float widen(uint16_t bits, int type) {
    uint32_t wide;
    if (type == R_16BF) {
        wide = uint32_t(bits) << 16;
    } else {
        const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
        if (exponent == 0) {
            const float small = fraction * 0x1p-24f;
            return sign ? -small : small;
        }
        wide = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    }
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

struct Work {
    uint64_t a, b, d;
    Matrix la, lb, ld;
};

std::vector<float> widened(uint64_t address, const Matrix& m) {
    std::vector<float> out(m.rows * m.cols);
    const uint16_t* from = reinterpret_cast<const uint16_t*>(address);
    for (uint64_t c = 0; c < m.cols; c++)
        for (uint64_t r = 0; r < m.rows; r++) out[c * m.rows + r] = widen(from[c * m.ld + r], m.type);
    return out;
}

// Column-major d = a^T b; k in one order for every element, whatever its row and column.
void multiply(void* argument) {
    const Work* w = static_cast<Work*>(argument);
    const auto a = widened(w->a, w->la), b = widened(w->b, w->lb);
    float* d = reinterpret_cast<float*>(w->d);
    const uint64_t k = w->la.rows;
    for (uint64_t n = 0; n < w->ld.cols; n++)
        for (uint64_t m = 0; m < w->ld.rows; m++) {
            float sums[16] = {}, total = 0;
            uint64_t i = 0;
            for (; i + 16 <= k; i += 16)
                for (uint64_t lane = 0; lane < 16; lane++) sums[lane] += a[m * k + i + lane] * b[n * k + i + lane];
            for (; i < k; i++) sums[i % 16] += a[m * k + i] * b[n * k + i];
            for (float sum : sums) total += sum;
            d[n * w->ld.ld + m] = total;
        }
}

void release(void* argument) { delete static_cast<Work*>(argument); }

}  // namespace

extern "C" {

int cublasLtCreate(void** handle) {
    *handle = new int(0);
    fake_count(0, 1);
    return OK;
}

int cublasLtDestroy(void* handle) {
    delete static_cast<int*>(handle);
    fake_count(0, -1);
    return OK;
}

int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    if (rows == 0 || cols == 0 || ld < int64_t(rows)) return INVALID;
    *layout = new Matrix{type, rows, cols, ld};
    fake_count(0, 1);
    return OK;
}

int cublasLtMatrixLayoutDestroy(void* layout) {
    delete static_cast<Matrix*>(layout);
    fake_count(0, -1);
    return OK;
}

int cublasLtMatmulDescCreate(void** product, int compute, int scale) {
    if (compute != 68 || scale != R_32F) return UNSUPPORTED;
    *product = new Product;
    fake_count(0, 1);
    return OK;
}

int cublasLtMatmulDescSetAttribute(void* product, int attribute, const void* value, size_t len) {
    if (len != 4) return INVALID;
    if (attribute == 3) memcpy(&static_cast<Product*>(product)->transposed_a, value, 4);
    else if (attribute == 4) memcpy(&static_cast<Product*>(product)->transposed_b, value, 4);
    else return UNSUPPORTED;
    return OK;
}

int cublasLtMatmulDescDestroy(void* product) {
    delete static_cast<Product*>(product);
    fake_count(0, -1);
    return OK;
}

int cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = new int(0);
    fake_count(0, 1);
    return OK;
}

int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return OK; }

int cublasLtMatmulPreferenceDestroy(void* preference) {
    delete static_cast<int*>(preference);
    fake_count(0, -1);
    return OK;
}

struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

// The algorithm's mark is the weight's shape: one that is used with another weight is refused.
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void* a, void*, void*, void*, void*, int asked, Heuristic* found, int* num) {
    if (asked < 1) return INVALID;
    *found = Heuristic{};
    found->algorithm[0] = static_cast<Matrix*>(a)->rows;
    found->algorithm[1] = static_cast<Matrix*>(a)->cols;
    *num = 1;
    return OK;
}

int cublasLtMatmul(void*, void* product, const float* alpha, uint64_t a, void* la, uint64_t b, void* lb, const float* beta, uint64_t c, void* lc, uint64_t d,
                   void* ld, const uint64_t* algorithm, void*, size_t, void* stream) {
    const Matrix &ma = *static_cast<Matrix*>(la), &mb = *static_cast<Matrix*>(lb), &md = *static_cast<Matrix*>(ld);
    const Product& p = *static_cast<Product*>(product);
    if (!p.transposed_a || p.transposed_b || *alpha != 1 || *beta != 0 || c != d || lc != ld) return UNSUPPORTED;
    if (ma.type != mb.type || (ma.type != R_16F && ma.type != R_16BF) || md.type != R_32F) return UNSUPPORTED;
    if (ma.rows != mb.rows || ma.cols != md.rows || mb.cols != md.cols) return INVALID;
    if (algorithm && (algorithm[0] != ma.rows || algorithm[1] != ma.cols)) return INVALID;
    if (!fake_owns(a, ma.bytes()) || !fake_owns(b, mb.bytes()) || !fake_owns(d, md.bytes())) return INVALID;
    fake_count(1, 0);
    return fake_enqueue(stream, multiply, new Work{a, b, d, ma, mb, md}, release) == 0 ? OK : INVALID;
}

}  // extern "C"
