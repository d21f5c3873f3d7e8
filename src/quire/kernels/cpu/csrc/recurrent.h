// What recurrent layers have in common: how a step's tokens meet the pages that hold states, and the operations around the
// scans: short causal convolutions, gates, gated norms, scaled columns. Mirrored by `../recurrent.py`.
//
// A state in a page is float32 and `page_stride` floats from the next page's. Work is divided into requests and blocks of
// channels or heads: one thread takes a block of a request over all of its tokens.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "elementwise.h"
#include "simd.h"
#include "team.h"

namespace quire {

enum Gate : int32_t { kIdentity = 0, kSiluGate = 1, kSigmoid = 2 };

struct BatchArguments {
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* table_rows;
    const int32_t* block_table;
    const int64_t* shape;  // num_tokens, num_requests, max_query_len, max_seq_len
    int64_t block_size, block_table_stride;
};

struct ConvArguments {  // rows: tokens (unused)
    BatchArguments batch;
    const float* x;
    const float* weight;  // [width, channels]
    const float* bias;
    float* states;
    float* out;
    int64_t x_stride, page_stride, out_stride, channels, width;
    int32_t gate;
};

struct GateArguments {  // rows: tokens
    const float* x;
    const float* gate;
    float* out;
    int64_t x_stride, gate_stride, out_stride, channels, each;  // columns that one of the gate's serves
    int32_t kind;
};

struct GatedNormArguments {  // rows: tokens
    const float* x;
    const float* gate;
    const float* weight;
    float* out;
    int64_t x_stride, gate_stride, out_stride, channels, group;
    float eps;
    int32_t norm_first, kind;
};

struct ScaleColumnsArguments {  // rows: tokens
    const float* x;
    const float* scale;
    float* out;
    int64_t x_stride, out_stride, channels;
};

namespace QUIRE_ISA {

QUIRE_INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exponential(-x)); }

QUIRE_INLINE vf apply_gate(vf x, int32_t kind) {
    return kind == kIdentity ? x : kind == kSiluGate ? activate<kSilu>(x) : sigmoid(x);
}

// One request's tokens of this step, and its pages.
struct Request {
    int64_t start, end;  // rows of the step
    int64_t position;    // of the first
    int64_t block_size;
    const int32_t* pages;

    QUIRE_INLINE Request(const BatchArguments& batch, int64_t b)
        : start(batch.query_start[b]),
          end(batch.query_start[b + 1]),
          position(batch.seq_lens[b] - (end - start)),
          block_size(batch.block_size),
          pages(batch.block_table + batch.table_rows[b] * batch.block_table_stride) {}
    // The page that holds the state after `count` tokens of the request.
    QUIRE_INLINE int64_t page_after(int64_t count) const { return pages[(count - 1) / block_size]; }
    QUIRE_INLINE int64_t last_position() const { return position + (end - start); }
};

// All requests times `blocks` pieces, shared among the threads: body(request, block).
template <class Body>
QUIRE_INLINE void over_requests(const BatchArguments& batch, int64_t blocks, Team& team, Body body) {
    const int64_t count = batch.shape[1] * blocks;
    for (int64_t item = team.next(); item < count; item = team.next()) {
        Request request(batch, item / blocks);
        if (request.end > request.start) body(request, item % blocks);
    }
}

// A piece of the state, [rows, columns] of which are `row_stride` apart, over all tokens of a request: it lives in the page of
// the last token, starts as it is in the page before the first, and is copied to the pages that end on the way.
// step(state, token, count) advances it in place over some tokens, at most `most`.
template <class Step>
QUIRE_INLINE void over_tokens(const Request& request, float* states, int64_t page_stride, int64_t rows, int64_t row_stride,
                              int64_t columns, int64_t most, Step step) {
    const int64_t last_page = request.page_after(request.last_position());
    float* state = states + last_page * page_stride;
    auto copy = [&](float* to, const float* from) {
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(to + row * row_stride, from + row * row_stride, columns * sizeof(float));
    };
    if (request.position == 0) {
        for (int64_t row = 0; row < rows; ++row) std::memset(state + row * row_stride, 0, columns * sizeof(float));
    } else {
        const int64_t page = request.page_after(request.position);
        if (page != last_page) copy(state, states + page * page_stride);
    }
    int64_t done = request.position;
    for (int64_t t = request.start; t < request.end;) {
        const int64_t left = request.end - t, to_border = request.block_size - done % request.block_size;
        int64_t count = left < to_border ? left : to_border;
        count = count < most ? count : most;
        step(state, t, count);
        t += count, done += count;
        if (done % request.block_size == 0 && t < request.end)
            copy(states + request.page_after(done) * page_stride, state);
    }
}

constexpr int64_t CHANNEL_BLOCK = 64;

inline void causal_conv(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const ConvArguments*>(arguments);
    const int64_t kept = args.width - 1, blocks = (args.channels + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
    over_requests(args.batch, blocks, team, [&](const Request& request, int64_t block) {
        const int64_t first = block * CHANNEL_BLOCK;
        const int64_t columns = args.channels - first < CHANNEL_BLOCK ? args.channels - first : CHANNEL_BLOCK;
        const float* before =
            request.position ? args.states + request.page_after(request.position) * args.page_stride + first : nullptr;
        // The input `back` tokens after the first of this step (before it where negative); null where there is none.
        auto input = [&](int64_t back) -> const float* {
            if (back >= 0) return args.x + (request.start + back) * args.x_stride + first;
            return before ? before + (kept + back) * args.channels : nullptr;
        };
        for (int64_t t = 0; t < request.end - request.start; ++t) {
            float* out = args.out + (request.start + t) * args.out_stride + first;
            over_row(0, columns, [&](int64_t i, int n) {
                vf y = args.bias ? take(args.bias + first + i, n) : zero();
                for (int64_t w = 0; w < args.width; ++w) {
                    const float* x = input(t - kept + w);
                    if (x) y = fma(take(args.weight + w * args.channels + first + i, n), take(x + i, n), y);
                }
                put(out + i, apply_gate(y, args.gate), n);
            });
        }
        // The newest page first: only the oldest can be the one that `before` points to.
        const int64_t size = request.block_size, last = request.last_position();
        for (int64_t done = last; done > request.position; done = (done - 1) / size * size) {
            float* state = args.states + request.page_after(done) * args.page_stride + first;
            for (int64_t w = 0; w < kept; ++w) {
                const float* x = input(done - request.position - kept + w);
                if (x)
                    std::memmove(state + w * args.channels, x, columns * sizeof(float));
                else
                    std::memset(state + w * args.channels, 0, columns * sizeof(float));
            }
        }
    });
}

inline void gate(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const GateArguments*>(arguments);
    over_parts(rows, args.channels, team, [&](int64_t row, int64_t first, int64_t last) {
        const float *x = args.x + row * args.x_stride, *g = args.gate + row * args.gate_stride;
        float* out = args.out + row * args.out_stride;
        if (args.each == 1)
            return over_row(first, last, [&](int64_t i, int n) {
                put(out + i, take(x + i, n) * apply_gate(take(g + i, n), args.kind), n);
            });
        for (int64_t begin = first; begin < last;) {
            const int64_t column = begin / args.each, behind = (column + 1) * args.each, end = behind < last ? behind : last;
            const vf by = apply_gate(set1(g[column]), args.kind);
            over_row(begin, end, [&](int64_t i, int n) { put(out + i, take(x + i, n) * by, n); });
            begin = end;
        }
    });
}

inline void gated_norm(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const GatedNormArguments*>(arguments);
    const int64_t groups = args.channels / args.group;
    int64_t begin, end;
    team.share(rows * groups, begin, end);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / groups, first = item % groups * args.group;
        const float* x = args.x + row * args.x_stride + first;
        const float* g = args.gate ? args.gate + row * args.gate_stride + first : nullptr;
        const float* weight = args.weight + first;
        float* out = args.out + row * args.out_stride + first;
        auto value = [&](int64_t i, int n) {
            vf v = take(x + i, n);
            return args.norm_first || !g ? v : v * apply_gate(take(g + i, n), args.kind);
        };
        vf squares = zero();
        over_row(0, args.group, [&](int64_t i, int n) {
            vf v = value(i, n);
            squares = fma(v, v, squares);
        });
        const float scale = 1.f / std::sqrt(sum(squares) / static_cast<float>(args.group) + args.eps);
        over_row(0, args.group, [&](int64_t i, int n) {
            vf v = value(i, n) * scale * take(weight + i, n);
            put(out + i, args.norm_first && g ? v * apply_gate(take(g + i, n), args.kind) : v, n);
        });
    }
}

inline void scale_columns(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const ScaleColumnsArguments*>(arguments);
    over_parts(rows, args.channels, team, [&](int64_t row, int64_t first, int64_t last) {
        const float* x = args.x + row * args.x_stride;
        float* out = args.out + row * args.out_stride;
        over_row(first, last, [&](int64_t i, int n) {
            vf v = take(x + i, n);
            put(out + i, args.scale ? v * take(args.scale + i, n) : v, n);
        });
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
