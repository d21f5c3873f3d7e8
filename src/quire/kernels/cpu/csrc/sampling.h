// Argmax, plain or with Gumbel noise, masks of tokens, and filters as one threshold a row. `kernels/sampling.py` defines the
// noise, to the bit, and what the filters mean.
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
inline Best best_with_noise(const float* logits, int64_t begin, int64_t end, float scale, uint64_t seed, uint64_t position,
                            float threshold) {
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
            scaled[v] = rounded((x < threshold ? set1(-INFINITY) : x) * scale);
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
                                          static_cast<uint64_t>(args.seed[row]), static_cast<uint64_t>(args.position[row]),
                                          args.threshold ? args.threshold[row] : -INFINITY);
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

// The largest values of a row in descending order, at most `wanted` of those above minus infinity. Returns how many.
// Values are gathered until there are twice as many as wanted; then the smaller half goes, and bounds what may still come.
// `kept` has room for min(2 * wanted, v) + W values.
inline int64_t gather_largest(const float* logits, int64_t v, int64_t wanted, float* kept) {
    const int64_t room = 2 * wanted < v ? 2 * wanted : v;
    int64_t count = 0;
    float bound = -INFINITY;
    for (int64_t i = 0; i < v; i += W) {
        const int64_t end = i + W < v ? i + W : v;
        if (end - i == W && !any(load(logits + i) > bound)) continue;
        for (int64_t j = i; j < end; ++j)
            if (logits[j] > bound) kept[count++] = logits[j];
        if (count > room && count > wanted) {
            put_largest_first(kept, count, wanted);
            count = wanted;
            bound = kept[wanted - 1];
        }
    }
    if (count > wanted) {
        put_largest_first(kept, count, wanted);
        count = wanted;
    }
    sort_descending(kept, count);
    return count;
}

constexpr int BUCKETS = 4096;

// Where logits lie between the largest and `BUCKETS / scale` below it; `BUCKETS` is further away.
QUIRE_INLINE vi bucket_of(vf x, float most, float scale) {
    const vf place = rounded((most - x) * scale), furthest = set1(BUCKETS);
    return __builtin_convertvector(place < furthest ? place : furthest, vi);
}

// The logit at which the unnormalised probabilities, 1 for `most`, of the logits from `floor` on reach `top_p` of their sum, in
// descending order. One pass sums them up by their distance from the largest; the bucket in which the sum is reached is sorted.
// What lies further away than the last bucket is 2 v / (1 - top_p) times less likely than the largest: together too little to
// hold the end of the nucleus.
inline float nucleus_end(const float* logits, int64_t v, float most, float inverse_temperature, float floor, float top_p,
                         Team& team) {
    auto* mass = team.own<double>(BUCKETS * sizeof(double) + (v + W) * sizeof(float));
    auto* kept = reinterpret_cast<float*>(mass + BUCKETS);
    for (int i = 0; i < BUCKETS; ++i) mass[i] = 0;
    const double distance = std::log(2.0 * v / (1.0 - top_p)) / inverse_temperature;
    const auto scale = static_cast<float>(BUCKETS / distance);
    double beyond = 0;
    for (int64_t i = 0; i < v; i += W) {
        const int64_t count = i + W < v ? W : v - i;
        const vf x = count == W ? load(logits + i) : load_some(logits + i, static_cast<int>(count));
        vf weight = exponential((x - most) * inverse_temperature);
        weight = x < floor ? vf{} : weight;
        const vi bucket = bucket_of(x, most, scale);
        for (int64_t lane = 0; lane < count; ++lane)
            if (bucket[lane] < BUCKETS)
                mass[bucket[lane]] += weight[lane];
            else
                beyond += weight[lane];
    }
    double total = beyond;
    for (int i = 0; i < BUCKETS; ++i) total += mass[i];
    const double needed = total * top_p;
    double reached = 0;
    int last = 0;
    while (last < BUCKETS && reached + mass[last] < needed) reached += mass[last++];
    int64_t count = 0;
    for (int64_t i = 0; i < v; i += W) {
        const int64_t left = i + W < v ? W : v - i;
        const vi bucket = bucket_of(left == W ? load(logits + i) : load_some(logits + i, static_cast<int>(left)), most, scale);
        if (!any(bucket == last)) continue;
        for (int64_t lane = 0; lane < left; ++lane)
            if (bucket[lane] == last && logits[i + lane] >= floor) kept[count++] = logits[i + lane];
    }
    if (last == BUCKETS || count == 0) return floor;  // only rounding leads here
    sort_descending(kept, count);
    for (int64_t i = 0; i < count; ++i) {
        reached += std::exp((kept[i] - most) * inverse_temperature);
        if (reached >= needed) return kept[i];
    }
    return kept[count - 1];
}

inline float threshold_of(const ThresholdsArguments& args, int64_t row, Team& team) {
    const float* logits = args.logits + row * args.v;
    const double inverse = args.inverse_temperature[row], top_p = args.top_p[row];
    const int64_t v = args.v, top_k = args.top_k[row];
    const bool has_top_k = top_k > 0 && top_k < v, has_min_p = args.min_p[row] > 0;
    if (!std::isfinite(args.inverse_temperature[row]) || (!has_top_k && !has_min_p && top_p >= 1)) return -INFINITY;
    const float most = best_of_chunk(logits, 0, v).value;
    if (most == -INFINITY) return most;
    double threshold = has_min_p ? most + std::log(static_cast<double>(args.min_p[row])) / inverse : -INFINITY;
    if (!has_top_k)
        return top_p >= 1 ? static_cast<float>(threshold)
                          : nucleus_end(logits, v, most, args.inverse_temperature[row], static_cast<float>(threshold),
                                        args.top_p[row], team);
    float* kept = team.own<float>(((2 * top_k < v ? 2 * top_k : v) + W) * sizeof(float));
    const int64_t count = gather_largest(logits, v, top_k, kept);
    if (count == top_k && kept[top_k - 1] > threshold) threshold = kept[top_k - 1];
    if (top_p >= 1) return static_cast<float>(threshold);
    double total = 0, reached = 0;
    for (int64_t i = 0; i < count && kept[i] >= threshold; ++i) total += std::exp((kept[i] - most) * inverse);
    for (int64_t i = 0; i < count && kept[i] >= threshold; ++i) {
        reached += std::exp((kept[i] - most) * inverse);
        if (reached >= total * top_p) return kept[i];
    }
    return static_cast<float>(threshold);
}

inline void thresholds(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const ThresholdsArguments*>(arguments);
    for (int64_t row; (row = team.next()) < rows;) args.out[row] = threshold_of(args, row, team);
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
