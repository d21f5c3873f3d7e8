// What comes between the qkv projection and attention: norms of heads, rotary embedding, and the write to the cache.
#pragma once

#include "arguments.h"
#include "elementwise.h"
#include "simd.h"
#include "team.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int MAX_HEAD_DIM = 1024;

inline void norm_head(const float* x, const float* weight, int64_t h, float eps, float* out) {
    vf squares = zero();
    over_row(0, h, [&](int64_t i, int n) {
        vf value = take(x + i, n);
        squares = fma(value, value, squares);
    });
    float scale = 1.f / std::sqrt(sum(squares) / static_cast<float>(h) + eps);
    over_row(0, h, [&](int64_t i, int n) { put(out + i, take(x + i, n) * scale * take(weight + i, n), n); });
}

inline void rotate_head(float* x, const float* cos_sin, int64_t rotary_dim, bool interleaved) {
    const int64_t half = rotary_dim / 2;
    const float *cosine = cos_sin, *sine = cos_sin + half;
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosine[i] - b * sine[i];
            x[2 * i + 1] = b * cosine[i] + a * sine[i];
        }
        return;
    }
    over_row(0, half, [&](int64_t i, int n) {
        vf a = take(x + i, n), b = take(x + half + i, n), c = take(cosine + i, n), s = take(sine + i, n);
        put(x + i, a * c - b * s, n);
        put(x + half + i, b * c + a * s, n);
    });
}

template <class T>
void rope_typed(const RopeArguments& args, int64_t rows, Team& team) {
    const int64_t n = args.num_heads, k = args.num_kv_heads, h = args.head_dim, heads = n + 2 * k;
    T* cache = static_cast<T*>(args.cache);
    float head_buffer[MAX_HEAD_DIM];
    int64_t begin, end;
    team.share(rows * heads, begin, end);
    for (int64_t item = begin; item < end; ++item) {
        int64_t t = item / heads, head = item % heads;
        float* x = args.qkv + t * args.qkv_stride + head * h;
        if (head >= n) {
            int64_t slot = args.slot_mapping[t];
            if (slot < 0) continue;
            if (head < n + k) {
                std::memcpy(head_buffer, x, h * sizeof(float));
                x = head_buffer;
            }
        }
        if (head < n + k) {
            const float* weight = head < n ? args.q_norm : args.k_norm;
            if (weight) norm_head(x, weight, h, args.eps, x);
            if (args.cos_sin)
                rotate_head(x, args.cos_sin + static_cast<int64_t>(args.positions[t]) * args.rotary_dim, args.rotary_dim,
                            args.interleaved);
        }
        if (head < n) continue;
        int64_t slot = args.slot_mapping[t], page = slot / args.block_size, offset = slot % args.block_size;
        int64_t is_value = head >= n + k, kv_head = head - n - (is_value ? k : 0);
        T* out = cache + is_value * args.plane_stride + page * args.page_stride + (kv_head * args.block_size + offset) * h;
        int64_t i = 0;
        for (; i + W <= h; i += W) {
            if constexpr (sizeof(T) == 4)
                store(reinterpret_cast<float*>(out) + i, load(x + i));
            else
                store(out + i, load(x + i));
        }
        for (; i < h; ++i) from_float(out + i, x[i]);
    }
}

inline void rope_and_cache(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const RopeArguments*>(arguments);
    if (args.dtype == kBFloat16)
        rope_typed<bf16>(args, rows, team);
    else if (args.dtype == kFloat16)
        rope_typed<f16>(args, rows, team);
    else
        rope_typed<float>(args, rows, team);
}

}  // namespace QUIRE_ISA
}  // namespace quire
