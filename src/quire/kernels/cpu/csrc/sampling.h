// Argmax, plain or with Gumbel noise, and masks of tokens. The noise is defined to the bit by `kernels/reference/sampling.py`.
#pragma once

#include <utility>

#include "arguments.h"
#include "simd.h"
#include "team.h"

namespace quire {
namespace QUIRE_ISA {

typedef uint64_t vw __attribute__((vector_size(W * 8)));

// Keeps a product from being fused with the addition that follows it: the definition rounds both.
QUIRE_INLINE vf rounded(vf v) {
#if defined(QUIRE_EMULATE_AVX512_BF16)
    asm("" : "+m"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

QUIRE_INLINE vf defined_log(vf x) {
    vi bits = bit_cast<vi>(x);
    vi exponent = (bits - 0x3f3504f3) >> 23;
    vf f = bit_cast<vf>(bits - (exponent << 23)) - 1.0f;
    vf e = convert_int(exponent);
    vf square = rounded(f * f);
    vf p = set1(7.0376836292e-2f);
    p = rounded(p * f) + -1.1514610310e-1f;
    p = rounded(p * f) + 1.1676998740e-1f;
    p = rounded(p * f) + -1.2420140846e-1f;
    p = rounded(p * f) + 1.4249322787e-1f;
    p = rounded(p * f) + -1.6668057665e-1f;
    p = rounded(p * f) + 2.0000714765e-1f;
    p = rounded(p * f) + -2.4999993993e-1f;
    p = rounded(p * f) + 3.3333331174e-1f;
    p = rounded(p * f);
    p = rounded(p * square);
    p = p + rounded(e * -2.12194440e-4f);
    p = p - rounded(square * 0.5f);
    return (f + p) + rounded(e * 0.693359375f);
}

QUIRE_INLINE vf noise_of(vu words) {
    vf u = convert_int(bit_cast<vi>((words >> 9) * 2 + 1)) * 0x1p-24f;
    return -defined_log(-defined_log(u));
}

// The noise lies between these (u is between 2^-24 and 1 - 2^-24); a little wider than it has to be.
constexpr float NOISE_LEAST = -2.82f, NOISE_MOST = 16.65f;

// At least noise_of(words), without logarithms: -log(-log(u)) <= -log(1 - u), of which an exponent tells enough.
QUIRE_INLINE vf noise_at_most(vu words) {
    vf rest = convert_int(bit_cast<vi>((~words >> 9) * 2 + 1));  // (1 - u) * 2^24, exactly
    vi exponent = (bit_cast<vi>(rest) >> 23) - 127;
    return convert_int(24 - exponent) * 0.6931473f + 1e-3f;
}

QUIRE_INLINE bool any(vi mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask(bit_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(bit_cast<__m256>(mask)) != 0;
#else
    int32_t lanes = 0;
    for (int i = 0; i < W; ++i) lanes |= mask[i];
    return lanes != 0;
#endif
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define QUIRE_SHUFFLES 1
#endif
#endif

template <int... I>
QUIRE_INLINE void interleave(vf a, vf b, vf& low, vf& high, std::integer_sequence<int, I...>) {
#if defined(QUIRE_SHUFFLES)
    low = __builtin_shufflevector(a, b, (I / 2 + I % 2 * W)...);
    high = __builtin_shufflevector(a, b, (W / 2 + I / 2 + I % 2 * W)...);
#else
    for (int i = 0; i < W; ++i) {
        low[i] = i % 2 ? b[i / 2] : a[i / 2];
        high[i] = i % 2 ? b[W / 2 + i / 2] : a[W / 2 + i / 2];
    }
#endif
}

// From word j of each block to the order of the vocabulary: in[j][lane] becomes element 4 * lane + j.
QUIRE_INLINE void by_element(const vf (&in)[4], vf (&out)[4]) {
    vf a, b, c, d;
    const auto lanes = std::make_integer_sequence<int, W>{};
    interleave(in[0], in[2], a, b, lanes);
    interleave(in[1], in[3], c, d, lanes);
    interleave(a, c, out[0], out[1], lanes);
    interleave(b, d, out[2], out[3], lanes);
}

QUIRE_INLINE void multiply_wide(vu a, uint32_t b, vu& high, vu& low) {
    vw product = __builtin_convertvector(a, vw) * static_cast<uint64_t>(b);
    high = __builtin_convertvector(product >> 32, vu);
    low = a * b;
}

// Philox4x32-10 for W consecutive blocks; out[j][lane] is word j of block first + lane.
QUIRE_INLINE void philox(uint32_t first, uint64_t seed, uint64_t position, vu (&out)[4]) {
    vu c0, c1{}, c2, c3;
    for (int i = 0; i < W; ++i) c0[i] = first + i;
    c2 = vu{} + static_cast<uint32_t>(position);
    c3 = vu{} + static_cast<uint32_t>(position >> 32);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        vu high0, low0, high1, low1;
        multiply_wide(c0, 0xD2511F53u, high0, low0);
        multiply_wide(c2, 0xCD9E8D57u, high1, low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

struct Best {
    float value;
    int32_t index;
    // The first of equals; a NaN is never the largest.
    void offer(float candidate, int64_t at) {
        if (candidate > value || index < 0) {
            if (!(candidate == candidate)) return;
            value = candidate;
            index = static_cast<int32_t>(at);
        }
    }
};

constexpr int64_t ARGMAX_CHUNK = 4096;  // a multiple of 4 * W

inline Best best_of_chunk(const float* logits, int64_t begin, int64_t end) {
    Best best{-INFINITY, -1};
    vf value = set1(-INFINITY);
    vi index{}, here;
    for (int i = 0; i < W; ++i) here[i] = static_cast<int32_t>(begin) + i;
    index = index - 1;
    int64_t i = begin;
    for (; i + W <= end; i += W, here = here + W) {
        vf x = load(logits + i);
        vi larger = x > value;
        value = larger ? x : value;
        index = larger ? here : index;
    }
    for (int lane = 0; lane < W; ++lane)
        if (index[lane] >= 0 && (best.index < 0 || value[lane] > best.value ||
                                 (value[lane] == best.value && index[lane] < best.index)))
            best = Best{value[lane], index[lane]};
    for (; i < end; ++i)
        if (logits[i] > best.value) best = Best{logits[i], static_cast<int32_t>(i)};
    // Nothing above minus infinity: the first one, unless it is no number.
    if (best.index < 0)
        for (i = begin; i < end && best.index < 0; ++i) best.offer(logits[i], i);
    return best;
}

// Most elements cannot win, whatever their noise: they are left out before their noise is computed, or before its
// logarithms are. Roundings are monotonic, so that a bound on the noise is a bound on the score.
inline Best best_with_noise(const float* logits, int64_t begin, int64_t end, float scale, uint64_t seed, uint64_t position) {
    Best best = best_of_chunk(logits, begin, end);
    if (best.index < 0 || best.value == -INFINITY) return best;
    // Some element surely scores this much; a score below it need not be looked at.
    float needed = best.value * scale + NOISE_LEAST;
    best = Best{-INFINITY, -1};
    alignas(64) float scores[4 * W];
    for (int64_t i = begin; i < end; i += 4 * W) {
        const int64_t count = end - i < 4 * W ? end - i : 4 * W;
        vf scaled[4];
        vi possible{};
        for (int v = 0; v < 4; ++v) {
            int lanes = static_cast<int>(count - v * W < 0 ? 0 : count - v * W < W ? count - v * W : W);
            vf x = lanes == W ? load(logits + i + v * W) : load_some(logits + i + v * W, lanes);
            scaled[v] = rounded(x * scale);
            possible |= scaled[v] + NOISE_MOST >= set1(needed);
        }
        if (!any(possible)) continue;
        vu words[4];
        philox(static_cast<uint32_t>(i / 4), seed, position, words);
        vf by_word[4], noise[4];
        for (int j = 0; j < 4; ++j) by_word[j] = noise_at_most(words[j]);
        by_element(by_word, noise);
        possible = vi{};
        for (int v = 0; v < 4; ++v) possible |= scaled[v] + noise[v] >= set1(needed);
        if (!any(possible)) continue;
        for (int j = 0; j < 4; ++j) by_word[j] = noise_of(words[j]);
        by_element(by_word, noise);
        for (int v = 0; v < 4; ++v) store(scores + v * W, scaled[v] + noise[v]);
        for (int64_t j = 0; j < count; ++j) best.offer(scores[j], i + j);
        if (best.value > needed) needed = best.value;
    }
    return best;
}

// Elements from `begin` (a multiple of 32) to `end` whose bit is not set become minus infinity.
inline void hide_forbidden(float* logits, const int32_t* allowed, int64_t begin, int64_t end) {
    vi place;
    for (int i = 0; i < W; ++i) place[i] = 1 << i;
    for (int64_t first = begin; first < end; first += 32) {
        const auto bits = static_cast<uint32_t>(allowed[first / 32]);
        if (bits == 0xffffffffu) continue;
        float* to = logits + first;
        if (end - first >= 32) {
            for (int i = 0; i < 32; i += W) {
                const vi is_allowed = ((vi{} + static_cast<int32_t>(bits >> i)) & place) != 0;
                store(to + i, is_allowed ? load(to + i) : set1(-INFINITY));
            }
        } else {
            for (int64_t i = 0; i < end - first; ++i) to[i] = bits >> i & 1 ? to[i] : -INFINITY;
        }
    }
}

inline void argmax(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const ArgmaxArguments*>(arguments);
    const int64_t chunks = (args.v + ARGMAX_CHUNK - 1) / ARGMAX_CHUNK;
    Best* found = team.common<Best>(rows * chunks * sizeof(Best));
    for (int64_t task; (task = team.next()) < rows * chunks;) {
        int64_t row = task / chunks, begin = task % chunks * ARGMAX_CHUNK;
        int64_t end = begin + ARGMAX_CHUNK < args.v ? begin + ARGMAX_CHUNK : args.v;
        float* logits = args.logits + row * args.v;
        if (args.slots && args.slots[row] >= 0)
            hide_forbidden(logits, args.allowed + args.slots[row] * args.words, begin, end);
        if (args.seed && std::isfinite(args.inverse_temperature[row]))
            found[task] = best_with_noise(logits, begin, end, args.inverse_temperature[row],
                                          static_cast<uint64_t>(args.seed[row]), static_cast<uint64_t>(args.position[row]));
        else
            found[task] = best_of_chunk(logits, begin, end);
    }
    team.barrier();
    int64_t first, last;
    team.share(rows, first, last);
    for (int64_t row = first; row < last; ++row) {
        Best best{-INFINITY, -1};
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            if (found[row * chunks + chunk].index >= 0)
                best.offer(found[row * chunks + chunk].value, found[row * chunks + chunk].index);
        args.out[row] = best.index < 0 ? 0 : best.index;
    }
}

inline void keep_allowed(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const KeepAllowedArguments*>(arguments);
    int64_t first, last;
    team.share(rows, first, last);
    for (int64_t row = first; row < last; ++row)
        if (args.slots[row] >= 0)
            hide_forbidden(args.logits + row * args.v, args.allowed + args.slots[row] * args.words, 0, args.v);
}

}  // namespace QUIRE_ISA
}  // namespace quire
