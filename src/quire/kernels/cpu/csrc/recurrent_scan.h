// The scans of recurrent layers: Mamba's, Mamba-2's and the gated delta rule. Token after token, vectors over channels.
// The state of a block stays in the caches from token to token, in the page where it ends up.
#pragma once

#include "recurrent.h"

namespace quire {

struct SelectiveScanArguments {  // rows: tokens (unused)
    BatchArguments batch;
    const float* x;
    const float* dt;
    const float* b;
    const float* c;
    const float* a;  // [state, channels]
    const float* d;
    float* states;  // [page, state, channels]
    float* out;
    int64_t x_stride, dt_stride, b_stride, c_stride, page_stride, out_stride, channels, state;
};

struct SsdArguments {  // rows: tokens (unused)
    BatchArguments batch;
    const float* x;
    const float* dt;
    const float* b;
    const float* c;
    const float* a;
    const float* d;
    const float* dt_bias;
    float* states;  // [page, head, state, head_dim]
    float* out;
    int64_t x_stride, dt_stride, b_stride, c_stride, page_stride, out_stride, heads, groups, head_dim, state;
    float dt_min, dt_max;
};

struct DeltaArguments {  // rows: tokens (unused)
    BatchArguments batch;
    const float* q;
    const float* k;
    const float* v;
    const float* a;
    const float* b;
    const float* a_weight;
    const float* dt_bias;
    float* states;  // [page, head, state, head_dim]
    float* out;
    int64_t q_stride, k_stride, v_stride, a_stride, b_stride, page_stride, out_stride, heads, key_heads, head_dim, state;
    float beta_scale;
};

namespace QUIRE_ISA {

inline void selective_scan(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const SelectiveScanArguments*>(arguments);
    const int64_t channels = args.channels, blocks = (channels + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
    over_requests(args.batch, blocks, team, [&](const Request& request, int64_t block) {
        const int64_t first = block * CHANNEL_BLOCK;
        const int64_t columns = channels - first < CHANNEL_BLOCK ? channels - first : CHANNEL_BLOCK;
        auto step = [&](float* state, int64_t t) {
            const float *b = args.b + t * args.b_stride, *c = args.c + t * args.c_stride;
            over_row(0, columns, [&](int64_t i, int n) {
                vf dt = softplus(take(args.dt + t * args.dt_stride + first + i, n));
                vf x = take(args.x + t * args.x_stride + first + i, n), input = dt * x;
                vf y = x * take(args.d + first + i, n);
                for (int64_t s = 0; s < args.state; ++s) {
                    float* h = state + s * channels + i;
                    vf decay = exponential(dt * take(args.a + s * channels + first + i, n));
                    vf next = fma(decay, take(h, n), input * b[s]);
                    put(h, next, n);
                    y = fma(next, set1(c[s]), y);
                }
                put(args.out + t * args.out_stride + first + i, y, n);
            });
        };
        over_tokens(request, args.states + first, args.page_stride, args.state, channels, columns, step);
    });
}

// softplus of one number, in the same arithmetic as of many.
QUIRE_INLINE float softplus_of(float x) { return softplus(set1(x))[0]; }

inline void ssd_scan(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const SsdArguments*>(arguments);
    const int64_t size = args.head_dim, blocks = (size + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
    over_requests(args.batch, args.heads * blocks, team, [&](const Request& request, int64_t block) {
        const int64_t head = block / blocks, group = head / (args.heads / args.groups);
        const int64_t first = block % blocks * CHANNEL_BLOCK;
        const int64_t columns = size - first < CHANNEL_BLOCK ? size - first : CHANNEL_BLOCK;
        const int64_t at = head * size + first;
        auto step = [&](float* state, int64_t t) {
            const float* b = args.b + t * args.b_stride + group * args.state;
            const float* c = args.c + t * args.c_stride + group * args.state;
            float dt = softplus_of(args.dt[t * args.dt_stride + head] + args.dt_bias[head]);
            dt = dt < args.dt_min ? args.dt_min : dt > args.dt_max ? args.dt_max : dt;
            const vf decay = exponential(set1(dt * args.a[head]));
            over_row(0, columns, [&](int64_t i, int n) {
                vf x = take(args.x + t * args.x_stride + at + i, n), input = dt * x;
                vf y = x * args.d[head];
                for (int64_t s = 0; s < args.state; ++s) {
                    float* h = state + s * size + i;
                    vf next = fma(decay, take(h, n), input * b[s]);
                    put(h, next, n);
                    y = fma(next, set1(c[s]), y);
                }
                put(args.out + t * args.out_stride + at + i, y, n);
            });
        };
        float* states = args.states + head * args.state * size + first;
        over_tokens(request, states, args.page_stride, args.state, size, columns, step);
    });
}

// 1 / the length of a vector.
QUIRE_INLINE float inverse_length(const float* x, int64_t size) {
    vf squares = zero();
    over_row(0, size, [&](int64_t i, int n) {
        vf v = take(x + i, n);
        squares = fma(v, v, squares);
    });
    return 1.f / std::sqrt(sum(squares) + 1e-6f);
}

inline void gated_delta_rule(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const DeltaArguments*>(arguments);
    const int64_t size = args.head_dim, blocks = (size + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
    const float query_scale = 1.f / std::sqrt(static_cast<float>(args.state));
    over_requests(args.batch, args.heads * blocks, team, [&](const Request& request, int64_t block) {
        const int64_t head = block / blocks, key_head = head / (args.heads / args.key_heads);
        const int64_t first = block % blocks * CHANNEL_BLOCK;
        const int64_t columns = size - first < CHANNEL_BLOCK ? size - first : CHANNEL_BLOCK;
        const int64_t at = head * size + first;
        auto step = [&](float* state, int64_t t) {
            const float* q = args.q + t * args.q_stride + key_head * args.state;
            const float* k = args.k + t * args.k_stride + key_head * args.state;
            const float q_scale = inverse_length(q, args.state) * query_scale, k_scale = inverse_length(k, args.state);
            const float dt = softplus_of(args.a[t * args.a_stride + head] + args.dt_bias[head]);
            const vf decay = exponential(set1(dt * args.a_weight[head]));
            const float beta = sigmoid(set1(args.b[t * args.b_stride + head]))[0] * args.beta_scale;
            over_row(0, columns, [&](int64_t i, int n) {
                vf recalled = zero();
                for (int64_t s = 0; s < args.state; ++s) recalled = fma(take(state + s * size + i, n), set1(k[s]), recalled);
                vf value = take(args.v + t * args.v_stride + at + i, n);
                vf error = (value - recalled * decay * k_scale) * (beta * k_scale), y = zero();
                for (int64_t s = 0; s < args.state; ++s) {
                    float* h = state + s * size + i;
                    vf next = fma(decay, take(h, n), error * k[s]);
                    put(h, next, n);
                    y = fma(next, set1(q[s]), y);
                }
                put(args.out + t * args.out_stride + at + i, y * q_scale, n);
            });
        };
        float* states = args.states + head * args.state * size + first;
        over_tokens(request, states, args.page_stride, args.state, size, columns, step);
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
