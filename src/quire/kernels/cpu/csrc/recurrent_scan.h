// The scans of recurrent layers: Mamba's, Mamba-2's, the gated delta rule, Griffin's and RWKV-4's. Token after token, vectors
// over channels.
// The state of a block stays in the caches from token to token, in the page where it ends up.
#pragma once

#include <utility>

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
    float beta_scale, floor;
    int32_t by_number;  // each number of a state's column has a decay
};

struct RgLruArguments {  // rows: tokens (unused)
    BatchArguments batch;
    const float* x;
    const float* input;
    const float* forget;
    const float* a;
    const float* input_bias;
    const float* forget_bias;
    float* states;  // [page, 1, channels]
    float* out;
    int64_t x_stride, input_stride, forget_stride, page_stride, out_stride, channels;
};

struct WkvArguments {  // rows: tokens (unused)
    BatchArguments batch;
    const float* k;
    const float* v;
    const float* decay;
    const float* first;
    float* states;  // [page, 3, channels]: weighted sum, sum of weights, logarithm of what both are divided by
    float* out;
    int64_t k_stride, v_stride, page_stride, out_stride, channels;
};

namespace QUIRE_ISA {

inline void rg_lru(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const RgLruArguments*>(arguments);
    const int64_t channels = args.channels, blocks = (channels + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
    over_requests(args.batch, blocks, team, [&](const Request& request, int64_t block) {
        const int64_t at = block * CHANNEL_BLOCK, columns = channels - at < CHANNEL_BLOCK ? channels - at : CHANNEL_BLOCK;
        auto step = [&](float* state, int64_t t, int64_t) {
            const bool is_first = request.position == 0 && t == request.start;
            over_row(0, columns, [&](int64_t i, int n) {
                const int64_t c = at + i;
                vf forget = sigmoid(take(args.forget + t * args.forget_stride + c, n) + take(args.forget_bias + c, n));
                vf given = sigmoid(take(args.input + t * args.input_stride + c, n) + take(args.input_bias + c, n));
                vf decay = exponential(take(args.a + c, n) * forget);
                vf scale = is_first ? set1(1.f) : square_root(max(1.f - decay * decay, zero()));
                vf h = fma(decay, take(state + i, n), take(args.x + t * args.x_stride + c, n) * given * scale);
                put(state + i, h, n);
                put(args.out + t * args.out_stride + c, h, n);
            });
        };
        over_tokens(request, args.states + at, args.page_stride, 1, channels, columns, 1, step);
    });
}

inline void wkv(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const WkvArguments*>(arguments);
    const int64_t channels = args.channels, blocks = (channels + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
    over_requests(args.batch, blocks, team, [&](const Request& request, int64_t block) {
        const int64_t at = block * CHANNEL_BLOCK, columns = channels - at < CHANNEL_BLOCK ? channels - at : CHANNEL_BLOCK;
        auto step = [&](float* state, int64_t t, int64_t) {
            const bool is_first = request.position == 0 && t == request.start;
            over_row(0, columns, [&](int64_t i, int n) {
                float *totals = state + i, *weights = totals + channels, *scales = weights + channels;
                vf k = take(args.k + t * args.k_stride + at + i, n), v = take(args.v + t * args.v_stride + at + i, n);
                vf total = take(totals, n), weight = take(weights, n), own = k + take(args.first + at + i, n);
                vf scale = is_first ? set1(-1e38f) : take(scales, n), largest = max(scale, own);
                vf old = exponential(scale - largest);
                own = exponential(own - largest);
                put(args.out + t * args.out_stride + at + i, fma(own, v, old * total) / fma(old, weight, own), n);
                scale = scale + take(args.decay + at + i, n);
                largest = max(scale, k);
                old = exponential(scale - largest), own = exponential(k - largest);
                put(totals, fma(own, v, old * total), n);
                put(weights, fma(old, weight, own), n);
                put(scales, largest, n);
            });
        };
        over_tokens(request, args.states + at, args.page_stride, 3, channels, columns, 1, step);
    });
}

inline void selective_scan(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const SelectiveScanArguments*>(arguments);
    const int64_t channels = args.channels, blocks = (channels + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
    over_requests(args.batch, blocks, team, [&](const Request& request, int64_t block) {
        const int64_t first = block * CHANNEL_BLOCK;
        const int64_t columns = channels - first < CHANNEL_BLOCK ? channels - first : CHANNEL_BLOCK;
        auto step = [&](float* state, int64_t t, int64_t) {
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
        over_tokens(request, args.states + first, args.page_stride, args.state, channels, columns, 1, step);
    });
}

// softplus of one number, in the same arithmetic as of many.
QUIRE_INLINE float softplus_of(float x) { return softplus(set1(x))[0]; }

// Tokens whose states are computed while a number of the state is in a register.
constexpr int TOKEN_BLOCK = W == 16 ? 8 : 4;

// `count` tokens of some of a head's columns; b and c are the tokens' rows.
template <int count>
void ssd_tokens(const SsdArguments& args, float* state, int64_t t, int64_t head, int64_t at, int64_t columns) {
    const int64_t group = head / (args.heads / args.groups);
    const float* b = args.b + t * args.b_stride + group * args.state;
    const float* c = args.c + t * args.c_stride + group * args.state;
    float dt[count];
    vf decay[count];
    for (int k = 0; k < count; ++k) {
        dt[k] = softplus_of(args.dt[(t + k) * args.dt_stride + head] + args.dt_bias[head]);
        dt[k] = dt[k] < args.dt_min ? args.dt_min : dt[k] > args.dt_max ? args.dt_max : dt[k];
        decay[k] = exponential(set1(dt[k] * args.a[head]));
    }
    over_row(0, columns, [&](int64_t i, int n) {
        vf input[count], y[count];
        for (int k = 0; k < count; ++k) {
            vf x = take(args.x + (t + k) * args.x_stride + at + i, n);
            input[k] = dt[k] * x;
            y[k] = x * args.d[head];
        }
        for (int64_t s = 0; s < args.state; ++s) {
            float* place = state + s * args.head_dim + i;
            vf h = take(place, n);
#pragma GCC unroll 8
            for (int k = 0; k < count; ++k) {
                h = fma(decay[k], h, input[k] * b[k * args.b_stride + s]);
                y[k] = fma(h, set1(c[k * args.c_stride + s]), y[k]);
            }
            put(place, h, n);
        }
        for (int k = 0; k < count; ++k) put(args.out + (t + k) * args.out_stride + at + i, y[k], n);
    });
}

inline void ssd_scan(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const SsdArguments*>(arguments);
    const int64_t size = args.head_dim, blocks = (size + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
    over_requests(args.batch, args.heads * blocks, team, [&](const Request& request, int64_t block) {
        const int64_t head = block / blocks, first = block % blocks * CHANNEL_BLOCK;
        const int64_t columns = size - first < CHANNEL_BLOCK ? size - first : CHANNEL_BLOCK;
        const int64_t at = head * size + first;
        auto step = [&](float* state, int64_t t, int64_t count) {
            if (count == TOKEN_BLOCK) return ssd_tokens<TOKEN_BLOCK>(args, state, t, head, at, columns);
            for (int64_t k = 0; k < count; ++k) ssd_tokens<1>(args, state, t + k, head, at, columns);
        };
        float* states = args.states + head * args.state * size + first;
        over_tokens(request, states, args.page_stride, args.state, size, columns, TOKEN_BLOCK, step);
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

// What is left of a state after a token, for inputs that have `a_weight` and a bias.
QUIRE_INLINE vf delta_decay(const DeltaArguments& args, vf input, float a_weight) {
    return exponential(args.floor < 0.f ? args.floor * sigmoid(input * -a_weight) : softplus(input) * a_weight);
}

// The decays of one token's numbers in a head's columns, and its key times these.
QUIRE_INLINE void decays_by_number(const DeltaArguments& args, int64_t t, int64_t head, const float* key, float* decays,
                                   float* kept) {
    const float *a = args.a + t * args.a_stride + head * args.state, *bias = args.dt_bias + head * args.state;
    over_row(0, args.state, [&](int64_t i, int n) {
        vf decay = delta_decay(args, take(a + i, n) + take(bias + i, n), args.a_weight[head]);
        put(decays + i, decay, n);
        put(kept + i, decay * take(key + i, n), n);
    });
}

// As `delta_tokens`, where each number of a column has a decay. `room`: four numbers for each of them.
template <int vectors>
void delta_tokens_by_number(const DeltaArguments& args, float* state, int64_t t, int64_t count, int64_t head, int64_t at,
                            int n, float* room) {
    const int64_t key_head = head / (args.heads / args.key_heads), size = args.state;
    auto key = [&](int64_t k) { return args.k + (t + k) * args.k_stride + key_head * size; };
    auto lanes = [&](int v) { return v + 1 < vectors ? W : n; };
    float *decays = room, *kept = room + size, *next_decays = room + 2 * size, *next_kept = room + 3 * size;
    decays_by_number(args, t, head, key(0), decays, kept);
    vf recalled[vectors] = {};
    for (int64_t s = 0; s < size; ++s)
        for (int v = 0; v < vectors; ++v)
            recalled[v] = fma(take(state + s * args.head_dim + v * W, lanes(v)), set1(kept[s]), recalled[v]);
    for (int64_t k = 0; k < count; ++k) {
        const float *q = args.q + (t + k) * args.q_stride + key_head * size, *now = key(k);
        const int64_t following = k + 1 < count ? k + 1 : k;
        decays_by_number(args, t + following, head, key(following), next_decays, next_kept);
        const float q_scale = inverse_length(q, size) / std::sqrt(static_cast<float>(size));
        const float k_scale = inverse_length(now, size);
        const float beta = sigmoid(set1(args.b[(t + k) * args.b_stride + head]))[0] * args.beta_scale;
        vf error[vectors], y[vectors], ahead[vectors];
        for (int v = 0; v < vectors; ++v) {
            vf value = take(args.v + (t + k) * args.v_stride + at + v * W, lanes(v));
            error[v] = (value - recalled[v] * k_scale) * (beta * k_scale);
            y[v] = ahead[v] = zero();
        }
        for (int64_t s = 0; s < size; ++s) {
            const vf decay = set1(decays[s]), by_now = set1(now[s]), by_q = set1(q[s]), by_next = set1(next_kept[s]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                float* place = state + s * args.head_dim + v * W;
                vf h = fma(decay, take(place, lanes(v)), error[v] * by_now);
                put(place, h, lanes(v));
                y[v] = fma(h, by_q, y[v]);
                ahead[v] = fma(h, by_next, ahead[v]);
            }
        }
        for (int v = 0; v < vectors; ++v) {
            put(args.out + (t + k) * args.out_stride + at + v * W, y[v] * q_scale, lanes(v));
            recalled[v] = ahead[v];
        }
        std::swap(decays, next_decays), std::swap(kept, next_kept);
    }
}

// `count` tokens of `vectors` vectors of a head's columns (of the last, `n` lanes). The pass over the state that writes one
// token's value also reads what the next token's key recalls.
template <int vectors>
void delta_tokens(const DeltaArguments& args, float* state, int64_t t, int64_t count, int64_t head, int64_t at, int n) {
    const int64_t key_head = head / (args.heads / args.key_heads);
    auto key = [&](int64_t k) { return args.k + (t + k) * args.k_stride + key_head * args.state; };
    auto lanes = [&](int v) { return v + 1 < vectors ? W : n; };
    vf recalled[vectors] = {};
    for (int64_t s = 0; s < args.state; ++s)
        for (int v = 0; v < vectors; ++v)
            recalled[v] = fma(take(state + s * args.head_dim + v * W, lanes(v)), set1(key(0)[s]), recalled[v]);
    for (int64_t k = 0; k < count; ++k) {
        const float *q = args.q + (t + k) * args.q_stride + key_head * args.state, *now = key(k);
        const float* next = key(k + 1 < count ? k + 1 : k);
        const float q_scale = inverse_length(q, args.state) / std::sqrt(static_cast<float>(args.state));
        const float k_scale = inverse_length(now, args.state);
        const vf input = set1(args.a[(t + k) * args.a_stride + head] + args.dt_bias[head]);
        const float beta = sigmoid(set1(args.b[(t + k) * args.b_stride + head]))[0] * args.beta_scale;
        const vf decay = delta_decay(args, input, args.a_weight[head]);
        vf error[vectors], y[vectors], ahead[vectors];
        for (int v = 0; v < vectors; ++v) {
            vf value = take(args.v + (t + k) * args.v_stride + at + v * W, lanes(v));
            error[v] = (value - recalled[v] * decay * k_scale) * (beta * k_scale);
            y[v] = ahead[v] = zero();
        }
        for (int64_t s = 0; s < args.state; ++s) {
            const vf by_now = set1(now[s]), by_q = set1(q[s]), by_next = set1(next[s]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                float* place = state + s * args.head_dim + v * W;
                vf h = fma(decay, take(place, lanes(v)), error[v] * by_now);
                put(place, h, lanes(v));
                y[v] = fma(h, by_q, y[v]);
                ahead[v] = fma(h, by_next, ahead[v]);
            }
        }
        for (int v = 0; v < vectors; ++v) {
            put(args.out + (t + k) * args.out_stride + at + v * W, y[v] * q_scale, lanes(v));
            recalled[v] = ahead[v];
        }
    }
}

inline void gated_delta_rule(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const DeltaArguments*>(arguments);
    constexpr int vectors = W == 16 ? 4 : 2;
    constexpr int64_t wide = vectors * W;
    const int64_t size = args.head_dim, blocks = (size + wide - 1) / wide;
    over_requests(args.batch, args.heads * blocks, team, [&](const Request& request, int64_t block) {
        const int64_t head = block / blocks, first = block % blocks * wide, at = head * size + first;
        const int64_t columns = size - first < wide ? size - first : wide;
        auto step_by_number = [&](float* state, int64_t t, int64_t count) {
            float* room = static_cast<float*>(__builtin_alloca(4 * args.state * sizeof(float)));
            if (columns == wide) return delta_tokens_by_number<vectors>(args, state, t, count, head, at, W, room);
            for (int64_t i = 0; i < columns; i += W)
                delta_tokens_by_number<1>(args, state + i, t, count, head, at + i, columns - i < W ? columns - i : W, room);
        };
        auto step = [&](float* state, int64_t t, int64_t count) {
            if (args.by_number) return step_by_number(state, t, count);
            if (columns == wide) return delta_tokens<vectors>(args, state, t, count, head, at, W);
            for (int64_t i = 0; i < columns; i += W)
                delta_tokens<1>(args, state + i, t, count, head, at + i, columns - i < W ? columns - i : W);
        };
        float* states = args.states + head * args.state * size + first;
        over_tokens(request, states, args.page_stride, args.state, size, columns, INT64_MAX, step);
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
