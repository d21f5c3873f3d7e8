// The one inner kernel of linear layers and attention: C [MR, 16 * NP] (+)= A [MR, K] * B, with B in panels.
//
// A panel holds 16 columns. For pair p of k (k = 2p, 2p + 1): float32 and float16 store [2][16], bfloat16 stores [16][2], so
// that a bfloat16 dot-product instruction can use it as it is and everything else splits it with a shift and a mask.
// Every element of C is a sum of chains in the order of k, added to C when `accumulate`; a chain is the fused multiply-adds of
// CHAIN numbers of k, from zero on. Its value does not depend on MR, NP, the number of threads, the other rows of the batch, or on
// how K is cut into calls that begin where chains do. (A single chain rounds a growing sum once for every k:
// over 8192 it is six times as far off as PyTorch's product.)
#pragma once

#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int PANEL = 16;
constexpr int NV = PANEL / W;

// --- reading a pair of k from a panel -----------------------------------------------------------------------------

QUIRE_INLINE vf load_even(const float* p, int v) { return load(p + v * W); }
QUIRE_INLINE vf load_odd(const float* p, int v) { return load(p + PANEL + v * W); }
QUIRE_INLINE vf load_even(const f16* p, int v) { return load(p + v * W); }
QUIRE_INLINE vf load_odd(const f16* p, int v) { return load(p + PANEL + v * W); }
QUIRE_INLINE vu load_pair_bits(const bf16* p, int v) {
    vu bits;
    std::memcpy(&bits, p + v * 2 * W, sizeof bits);
    return bits;
}
QUIRE_INLINE vf load_even(const bf16* p, int v) { return bit_cast<vf>(load_pair_bits(p, v) << 16); }
QUIRE_INLINE vf load_odd(const bf16* p, int v) { return bit_cast<vf>(load_pair_bits(p, v) & 0xffff0000u); }

// Keeps an accumulator in its register: left alone, the compiler lets sums wander into the broadcast's register and spills.
QUIRE_INLINE void pin(vf& v) {
#if defined(QUIRE_EMULATE_AVX512_BF16)
    (void)v;
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
}

// --- how A is read, and the step over one pair of k ---------------------------------------------------------------

// A in float32. `AType` is what A's scratch holds; PER_PAIR how many of them make a pair of k.
template <class T>
struct Plain {
    using AType = float;
    static constexpr int PER_PAIR = 2;
    static constexpr int64_t CHAIN = W == 16 ? 256 : 192;
    template <bool odd, int MR, int NP>
    static QUIRE_INLINE void half_step(vf (&acc)[MR][NP][NV], const float* a, int64_t lda, const T* b, int64_t stride) {
        // Few registers: a panel at a time, its broadcasts from cache again. Many: all panels for one broadcast.
        constexpr int together = W == 16 ? NP : 1;
#pragma GCC unroll 4
        for (int first = 0; first < NP; first += together) {
            vf w[together][NV];
#pragma GCC unroll 4
            for (int p = 0; p < together; ++p)
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v)
                    w[p][v] = odd ? load_odd(b + (first + p) * stride, v) : load_even(b + (first + p) * stride, v);
#pragma GCC unroll 12
            for (int m = 0; m < MR; ++m) {
                vf x = set1(a[m * lda + odd]);
#pragma GCC unroll 4
                for (int p = 0; p < together; ++p)
#pragma GCC unroll 4
                    for (int v = 0; v < NV; ++v) {
                        vf& sum = acc[m][first + p][v];
                        sum = fma(w[p][v], x, sum);
                        if (sizeof(T) == 2) pin(sum);
                    }
            }
        }
    }
    template <int MR, int NP>
    static QUIRE_INLINE void step(vf (&acc)[MR][NP][NV], const float* a, int64_t lda, const T* b, int64_t stride) {
        half_step<false>(acc, a, lda, b, stride);
        // Reading the odd halves from cache again is cheaper than spilling an accumulator to keep them.
        asm("" : "+r"(b));
        half_step<true>(acc, a, lda, b, stride);
    }
    template <int MR, int NP>
    static QUIRE_INLINE void last(vf (&acc)[MR][NP][NV], const float* a, int64_t lda, const T* b, int64_t stride) {
#pragma GCC unroll 12
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p)
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v)
                    acc[m][p][v] = fma(load_even(b + p * stride, v), set1(a[m * lda]), acc[m][p][v]);
    }
};

#if defined(__AVX512BF16__) || defined(QUIRE_EMULATE_AVX512_BF16)
#if defined(__AVX512BF16__)
typedef __m512bh PairVector;
QUIRE_INLINE PairVector load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
QUIRE_INLINE PairVector repeat_pair(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)); }
QUIRE_INLINE vf dot_pairs(vf sums, PairVector w, PairVector x) { return _mm512_dpbf16_ps(sums, w, x); }
#else
typedef vu PairVector;
QUIRE_INLINE PairVector load_pairs(const bf16* p) { return load_pair_bits(p, 0); }
QUIRE_INLINE PairVector repeat_pair(uint32_t pair) { return vu{} + pair; }
QUIRE_INLINE vf dot_pairs(vf sums, PairVector w, PairVector x) {
    sums = fma(bit_cast<vf>(w & 0xffff0000u), bit_cast<vf>(x & 0xffff0000u), sums);
    return fma(bit_cast<vf>(w << 16), bit_cast<vf>(x << 16), sums);
}
#endif

// A in bfloat16 pairs: one instruction multiplies a pair of k.
struct DotPairs {
    using AType = uint32_t;
    static constexpr int PER_PAIR = 1;
    static constexpr int64_t CHAIN = 512;  // rounding A is what counts here
    template <int MR, int NP>
    static QUIRE_INLINE void step(vf (&acc)[MR][NP][NV], const uint32_t* a, int64_t lda, const bf16* b, int64_t stride) {
        PairVector w[NP];
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) w[p] = load_pairs(b + p * stride);
#pragma GCC unroll 12
        for (int m = 0; m < MR; ++m) {
            PairVector x = repeat_pair(a[m * lda]);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) acc[m][p][0] = dot_pairs(acc[m][p][0], w[p], x);
        }
    }
    template <int MR, int NP>
    static QUIRE_INLINE void last(vf (&acc)[MR][NP][NV], const uint32_t* a, int64_t lda, const bf16* b, int64_t stride) {
        step<MR, NP>(acc, a, lda, b, stride);  // A's scratch is padded with zero
    }
};
#endif

template <class T>
struct StepOf {
    using type = Plain<T>;
};
#if defined(__AVX512BF16__) || defined(QUIRE_EMULATE_AVX512_BF16)
template <>
struct StepOf<bf16> {
    using type = DotPairs;
};
#endif

// --- the kernel ---------------------------------------------------------------------------------------------------

struct MicroCall {
    const void* a;
    int64_t lda;  // in A's own elements
    const void* b;
    int64_t panel_stride;  // elements from a panel to the next
    int64_t k;
    float* c;
    int64_t ldc;
    bool accumulate;
    int64_t prefetch;  // bytes ahead of each panel's stream; 0: none
};

template <class T, int MR, int NP>
void micro(const MicroCall& call) {
    using S = typename StepOf<T>::type;
    const auto* a = static_cast<const typename S::AType*>(call.a);
    const auto* b = static_cast<const T*>(call.b);
    const int64_t lda = call.lda, stride = call.panel_stride, ahead = call.prefetch / static_cast<int64_t>(sizeof(T));
    constexpr int64_t CHAIN = S::CHAIN;
    // On the stack: rows of C may lie a power of two apart, and coming back to them after each chain would miss the caches.
    alignas(64) float total[MR * NP * PANEL];
    int64_t left = call.k;
    do {
        vf acc[MR][NP][NV];
#pragma GCC unroll 12
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p)
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) acc[m][p][v] = zero();
        const int64_t pairs = (left < CHAIN ? left : CHAIN) / 2;
        for (int64_t i = 0; i < pairs; ++i) {
            if (MR * NP <= 6) {
#pragma GCC unroll 4
                for (int p = 0; p < NP; ++p)
#pragma GCC unroll 2
                    for (size_t line = 0; line < sizeof(T) / 2; ++line)
                        __builtin_prefetch(reinterpret_cast<const char*>(b + p * stride + ahead) + 64 * line);
            }
            S::template step<MR, NP>(acc, a, lda, b, stride);
            a += S::PER_PAIR;
            b += 2 * PANEL;
        }
        if (left < CHAIN && (left & 1)) S::template last<MR, NP>(acc, a, lda, b, stride);
        auto each = [&](auto body) __attribute__((always_inline)) {
#pragma GCC unroll 12
            for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
                for (int p = 0; p < NP; ++p)
#pragma GCC unroll 4
                    for (int v = 0; v < NV; ++v)
                        body(acc[m][p][v], call.c + m * call.ldc + p * PANEL + v * W, total + ((m * NP + p) * NV + v) * W);
        };
        if (left < call.k)
            each([](vf& sum, float*, float* before) { sum = load(before) + sum; });
        else if (call.accumulate)
            each([](vf& sum, float* c, float*) { sum = load(c) + sum; });
        left -= CHAIN;
        if (left > 0)
            each([](vf& sum, float*, float* before) { store(before, sum); });
        else
            each([](vf& sum, float* c, float*) { store(c, sum); });
    } while (left > 0);
}

// Rows at once, and panels at once for so many rows: enough chains to hide the latency, within the registers.
constexpr int MAX_ROWS = W == 16 ? 12 : 6;
constexpr int panels_for(int rows) {
    if (W == 16) return rows <= 6 ? 4 : 2;
    if (W == 8) return rows == 1 ? 4 : rows == 2 ? 2 : 1;
    return rows == 1 ? 2 : 1;
}
constexpr int MAX_PANELS = 4;

using MicroFunction = void (*)(const MicroCall&);

template <class T, int MR>
MicroFunction micro_of_panels(int panels) {
    switch (panels) {
        case 1:
            return micro<T, MR, 1>;
        case 2:
            if (panels_for(MR) >= 2) return micro<T, MR, panels_for(MR) >= 2 ? 2 : 1>;
            break;
        case 3:
            if (panels_for(MR) >= 3) return micro<T, MR, panels_for(MR) >= 3 ? 3 : 1>;
            break;
        case 4:
            if (panels_for(MR) >= 4) return micro<T, MR, panels_for(MR) >= 4 ? 4 : 1>;
            break;
    }
    __builtin_unreachable();
}

template <class T>
MicroFunction micro_for(int rows, int panels) {
    switch (rows) {
        case 1: return micro_of_panels<T, 1>(panels);
        case 2: return micro_of_panels<T, 2>(panels);
        case 3: return micro_of_panels<T, 3>(panels);
        case 4: return micro_of_panels<T, 4>(panels);
        case 5: return micro_of_panels<T, 5>(panels);
        case 6: return micro_of_panels<T, 6>(panels);
    }
    if (MAX_ROWS == 12) {
        constexpr int extra = MAX_ROWS == 12 ? 6 : 0;
        switch (rows) {
            case 7: return micro_of_panels<T, 1 + extra>(panels);
            case 8: return micro_of_panels<T, 2 + extra>(panels);
            case 9: return micro_of_panels<T, 3 + extra>(panels);
            case 10: return micro_of_panels<T, 4 + extra>(panels);
            case 11: return micro_of_panels<T, 5 + extra>(panels);
            case 12: return micro_of_panels<T, 6 + extra>(panels);
        }
    }
    __builtin_unreachable();
}

// C [rows, 16 * panels] (+)= A * B for any number of rows: full tiles, the last ones evened out.
template <class T>
void multiply(MicroCall call, int64_t rows, int64_t panels) {
    using S = typename StepOf<T>::type;
    const auto* a = static_cast<const typename S::AType*>(call.a);
    const auto* b = static_cast<const T*>(call.b);
    float* c = call.c;
    int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    int largest_tile = static_cast<int>((rows + tiles - 1) / tiles);
    int64_t group = panels_for(largest_tile);
    for (int64_t panel = 0; panel < panels; panel += group) {
        int64_t width = panels - panel < group ? panels - panel : group;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            int64_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
            call.a = a + begin * call.lda;
            call.b = b + panel * call.panel_stride;
            call.c = c + begin * call.ldc + panel * PANEL;
            micro_for<T>(static_cast<int>(end - begin), static_cast<int>(width))(call);
        }
    }
}

// --- bringing A into the form that the step reads -----------------------------------------------------------------

// Bfloat16 pairs of one row, padded with zero to a whole pair.
inline void to_pairs(const float* x, int64_t k, uint32_t* out) {
    int64_t i = 0;
#if defined(__AVX512BF16__)
    for (; i + 32 <= k; i += 32) {
        __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
        _mm512_storeu_si512(out + i / 2, (__m512i)pairs);
    }
#endif
    for (; i < k; i += 2) {
        uint32_t high = i + 1 < k ? bf16_bits(x[i + 1]) : 0;
        out[i / 2] = bf16_bits(x[i]) | (high << 16);
    }
}

template <class T>
constexpr bool converts_a() {
    return StepOf<T>::type::PER_PAIR == 1;
}

}  // namespace QUIRE_ISA
}  // namespace quire
