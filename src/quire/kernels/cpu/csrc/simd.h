// One vector type, W float32 lanes, over AVX2, AVX-512, NEON or whatever the compiler makes of its vector extension.
// Everything that plain operators on vectors can express is written once; only the rest asks for the instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace quire {
namespace QUIRE_ISA {

#if defined(QUIRE_EMULATE_AVX512_BF16)  // the widest set's code on any machine, without its instructions: for tests
constexpr int W = 16;
#elif defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

#define QUIRE_INLINE inline __attribute__((always_inline))

template <class To, class From>
QUIRE_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

QUIRE_INLINE vf set1(float x) { return x - vf{}; }
QUIRE_INLINE vf zero() { return vf{}; }
QUIRE_INLINE vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
QUIRE_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
QUIRE_INLINE vf load_some(const float* p, int count) {
    vf v{};
    std::memcpy(&v, p, count * sizeof(float));
    return v;
}
QUIRE_INLINE void store_some(float* p, vf v, int count) { std::memcpy(p, &v, count * sizeof(float)); }

QUIRE_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

QUIRE_INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
QUIRE_INLINE vf min(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}
QUIRE_INLINE vf convert_int(vi v) { return __builtin_convertvector(v, vf); }

// --- 16-bit types -------------------------------------------------------------------------------------------------

QUIRE_INLINE float to_float(float x) { return x; }
QUIRE_INLINE float to_float(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
QUIRE_INLINE float to_float(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    // Multiplying by 2^112 moves the exponent's bias and normalises subnormal numbers; infinities need their own bits.
    float magnitude = bit_cast<float>(rest << 13) * 0x1p112f;
    uint32_t bits = rest >= 0x7c00 ? (rest << 13) | 0x7f800000u : bit_cast<uint32_t>(magnitude);
    return bit_cast<float>(bits | sign);
#endif
}

QUIRE_INLINE uint16_t bf16_bits(float x) {
    uint32_t bits = bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
QUIRE_INLINE uint16_t f16_bits(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (bits < 0x38800000)  // subnormal: let the adder round at the right place
        return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3f000000));
    return static_cast<uint16_t>(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
#endif
}
QUIRE_INLINE void from_float(float* p, float x) { *p = x; }
QUIRE_INLINE void from_float(bf16* p, float x) { p->bits = bf16_bits(x); }
QUIRE_INLINE void from_float(f16* p, float x) { p->bits = f16_bits(x); }

QUIRE_INLINE vf load(const bf16* p) {
    vh h;
    std::memcpy(&h, p, sizeof h);
    return bit_cast<vf>(__builtin_convertvector(h, vu) << 16);
}
QUIRE_INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__ARM_NEON)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
#else
    vf v;
    for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
    return v;
#endif
}
QUIRE_INLINE vu bf16_rounded(vf v) {  // in the low halves
    vu bits = bit_cast<vu>(v);
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    return (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}
QUIRE_INLINE void store(bf16* p, vf v) {
    vh h = __builtin_convertvector(bf16_rounded(v), vh);
    std::memcpy(p, &h, sizeof h);
}
QUIRE_INLINE void store(f16* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, 0));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, 0));
#elif defined(__ARM_NEON)
    vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(v)));
#else
    for (int i = 0; i < W; ++i) from_float(p + i, v[i]);
#endif
}

// --- reductions (in a fixed order) --------------------------------------------------------------------------------

QUIRE_INLINE float sum(vf v) {
    float lanes[W];
    std::memcpy(lanes, &v, sizeof v);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}
QUIRE_INLINE float largest(vf v) {
    float lanes[W];
    std::memcpy(lanes, &v, sizeof v);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

// --- functions ----------------------------------------------------------------------------------------------------

// e^x to about 1 ulp; exactly 0 below the smallest normal result. Coefficients: Moshier's Cephes.
QUIRE_INLINE vf exponential(vf x) {
    const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
    vf clamped = min(max(x, set1(-87.3f)), set1(88.37f));
    vf rounded = fma(clamped, set1(1.44269504088896341f), set1(magic));
    vf n = rounded - magic;
    vf r = fma(n, set1(-0.693359375f), clamped);
    r = fma(n, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    vi exponent = (bit_cast<vi>(rounded) - bit_cast<int32_t>(magic) + 127) << 23;
    vf result = p * bit_cast<vf>(exponent);
    return x < set1(-87.3f) ? zero() : result;
}

QUIRE_INLINE vf hyperbolic_tangent(vf x) {
    vf magnitude = bit_cast<vf>(bit_cast<vi>(x) & 0x7fffffff);
    vf square = x * x;
    vf p = set1(-5.70498872745e-3f);
    p = fma(p, square, set1(2.06390887954e-2f));
    p = fma(p, square, set1(-5.37397155531e-2f));
    p = fma(p, square, set1(1.33314422036e-1f));
    p = fma(p, square, set1(-3.33332819422e-1f));
    vf small = fma(p * square, x, x);
    vf e = exponential(magnitude + magnitude);
    vf large = 1.0f - 2.0f / (e + 1.0f);
    large = bit_cast<vf>(bit_cast<vi>(large) | (bit_cast<vi>(x) & static_cast<int32_t>(0x80000000)));
    return magnitude < set1(0.625f) ? small : large;
}

// log(1 + e^x): max(x, 0) + log1p(e^-|x|), the latter by the series of atanh, which keeps small results exact.
QUIRE_INLINE vf softplus(vf x) {
    vf magnitude = max(x, -x);
    vf u = exponential(-magnitude);
    vf s = u / (u + 2.0f), q = s * s;
    vf p = set1(2.0f / 17.0f);
    p = fma(p, q, set1(2.0f / 15.0f));
    p = fma(p, q, set1(2.0f / 13.0f));
    p = fma(p, q, set1(2.0f / 11.0f));
    p = fma(p, q, set1(2.0f / 9.0f));
    p = fma(p, q, set1(2.0f / 7.0f));
    p = fma(p, q, set1(2.0f / 5.0f));
    p = fma(p, q, set1(2.0f / 3.0f));
    p = fma(p, q, set1(2.0f));
    return fma(p, s, max(x, zero()));
}

QUIRE_INLINE vf square_root(vf x) {
    for (int i = 0; i < W; ++i) x[i] = std::sqrt(x[i]);
    return x;
}

// Abramowitz and Stegun 7.1.26: absolute error below 2e-7.
QUIRE_INLINE vf error_function(vf x) {
    vf magnitude = bit_cast<vf>(bit_cast<vi>(x) & 0x7fffffff);
    vf t = 1.0f / fma(magnitude, set1(0.3275911f), set1(1.0f));
    vf p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    vf result = 1.0f - p * t * exponential(-magnitude * magnitude);
    return bit_cast<vf>(bit_cast<vi>(result) | (bit_cast<vi>(x) & static_cast<int32_t>(0x80000000)));
}

}  // namespace QUIRE_ISA
}  // namespace quire
