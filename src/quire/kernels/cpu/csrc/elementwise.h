// Norms, activations, additions, gathers and the finishing of logits.
#pragma once

#include "arguments.h"
#include "simd.h"
#include "team.h"

namespace quire {
namespace QUIRE_ISA {

// Applies `body(index, count)` to whole vectors and to the rest of a row.
template <class Body>
QUIRE_INLINE void over_row(int64_t begin, int64_t end, Body body) {
    int64_t i = begin;
    for (; i + W <= end; i += W) body(i, W);
    if (i < end) body(i, static_cast<int>(end - i));
}
QUIRE_INLINE vf take(const float* p, int count) { return count == W ? load(p) : load_some(p, count); }
QUIRE_INLINE void put(float* p, vf v, int count) {
    if (count == W)
        store(p, v);
    else
        store_some(p, v, count);
}
QUIRE_INLINE vf keep_lanes(vf v, int count) {
    if (count == W) return v;
    float lanes[W] = {};
    store_some(lanes, v, count);
    return load(lanes);
}

// Rows × parts of a row: few long rows are split by columns, many rows are not. body(row, begin, end).
template <class Body>
QUIRE_INLINE void over_parts(int64_t rows, int64_t d, Team& team, Body body) {
    int64_t parts = rows >= team.size ? 1 : (d + 1023) / 1024;
    int64_t begin, end;
    team.share(rows * parts, begin, end);
    for (int64_t item = begin; item < end; ++item) {
        int64_t row = item / parts, part = item % parts;
        int64_t step = (d / parts + W) / W * W;
        int64_t first = part * step < d ? part * step : d, last = first + step < d ? first + step : d;
        body(row, first, last);
    }
}

inline void norm(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const NormArguments*>(arguments);
    int64_t begin, end;
    team.share(rows * args.groups, begin, end);
    for (int64_t item = begin; item < end; ++item) {
        int64_t t = item / args.groups, group = item % args.groups * args.d;
        const float* x = args.x + t * args.stride + group;
        const float* weight = args.weight + group;
        float* out = args.out + t * args.stride + group;
        if (args.residual) {
            float* residual = args.residual + t * args.d;
            over_row(0, args.d, [&](int64_t i, int n) { put(residual + i, take(residual + i, n) + take(x + i, n), n); });
            x = residual;
        }
        float mean = 0.f;
        if (args.subtract_mean) {
            vf total = zero();
            over_row(0, args.d, [&](int64_t i, int n) { total = total + take(x + i, n); });
            mean = sum(total) / static_cast<float>(args.d);
        }
        vf squares[2] = {zero(), zero()};
        int which = 0;
        over_row(0, args.d, [&](int64_t i, int n) {
            vf centred = keep_lanes(take(x + i, n) - mean, n);
            squares[which] = fma(centred, centred, squares[which]);
            which ^= 1;
        });
        float scale = 1.f / std::sqrt(sum(squares[0] + squares[1]) / static_cast<float>(args.d) + args.eps);
        over_row(0, args.d, [&](int64_t i, int n) {
            vf value = (take(x + i, n) - mean) * scale * take(weight + i, n);
            if (args.bias) value = value + take(args.bias + group + i, n);
            put(out + i, value, n);
        });
    }
}

inline void add(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const AddArguments*>(arguments);
    over_parts(rows, args.d, team, [&](int64_t row, int64_t first, int64_t last) {
        const float* x = args.x + row * args.d;
        float* out = args.out + row * args.d;
        over_row(first, last, [&](int64_t i, int n) {
            put(out + i, fma(take(x + i, n), set1(args.scale), take(out + i, n)), n);
        });
    });
}

template <int kind>
QUIRE_INLINE vf activate(vf x) {
    if (kind == kSilu) return x / (1.0f + exponential(-x));
    if (kind == kQuickGelu) return x / (1.0f + exponential(-1.702f * x));
    if (kind == kLogistic) return 1.0f / (1.0f + exponential(-x));
    if (kind == kGelu || kind == kGelu10) {
        vf result = 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
        return kind == kGelu ? result : min(result, set1(10.0f));
    }
    if (kind == kGeluTanh) {
        vf inner = 0.79788456080286536f * fma(0.044715f * x * x, x, x);
        return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
    }
    if (kind == kTanh) return hyperbolic_tangent(x);
    if (kind == kMish) {  // tanh(log(1 + e)) = e (e + 2) / (e (e + 2) + 2), which is 1 long before e is infinite
        vf e = exponential(min(x, set1(20.0f))), n = e * (e + 2.0f);
        return x * (n / (n + 2.0f));
    }
    if (kind == kHardSwish) return x * (min(max(x + 3.0f, zero()), set1(6.0f)) / 6.0f);
    if (kind == kLeakyRelu) return max(x, 0.01f * x);
    if (kind == kLinear) return x;
    if (kind == kLaplace) return 0.5f * (1.0f + error_function((x - 0.707107f) * 2.5066264f));  // mean, 1 / (0.282095 sqrt 2)
    if (kind == kSqrtSoftplus) return square_root(softplus(x));
    vf positive = max(x, zero());
    if (kind == kRelu6) return min(positive, set1(6.0f));
    return kind == kRelu2 ? positive * positive : positive;
}

template <int kind>
struct Kind {
    static constexpr int value = kind;
};

// body(Kind<kind>()): what is done with an activation, compiled for each.
template <class Body>
void with_kind(int32_t kind, Body body) {
    switch (kind) {
        case kSilu: return body(Kind<kSilu>());
        case kGelu: return body(Kind<kGelu>());
        case kGeluTanh: return body(Kind<kGeluTanh>());
        case kRelu: return body(Kind<kRelu>());
        case kRelu2: return body(Kind<kRelu2>());
        case kQuickGelu: return body(Kind<kQuickGelu>());
        case kGelu10: return body(Kind<kGelu10>());
        case kRelu6: return body(Kind<kRelu6>());
        case kLeakyRelu: return body(Kind<kLeakyRelu>());
        case kLogistic: return body(Kind<kLogistic>());
        case kTanh: return body(Kind<kTanh>());
        case kMish: return body(Kind<kMish>());
        case kHardSwish: return body(Kind<kHardSwish>());
        case kLinear: return body(Kind<kLinear>());
        case kLaplace: return body(Kind<kLaplace>());
        case kSqrtSoftplus: return body(Kind<kSqrtSoftplus>());
    }
}

template <int kind>
void activation_of(const ActivationArguments& args, int64_t rows, Team& team) {
    over_parts(rows, args.d, team, [&](int64_t row, int64_t first, int64_t last) {
        const float* x = args.x + row * args.d * (args.gated ? 2 : 1);
        float* out = args.out + row * args.d;
        over_row(first, last, [&](int64_t i, int n) {
            vf value = activate<kind>(take(x + i, n));
            put(out + i, args.gated ? value * take(x + args.d + i, n) : value, n);
        });
    });
}

inline void activation(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const ActivationArguments*>(arguments);
    with_kind(args.kind, [&](auto kind) { activation_of<kind.value>(args, rows, team); });
}

inline void xielu(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const XieluArguments*>(arguments);
    const float above = args.alphas[0], below = args.alphas[1];
    over_parts(rows, args.d, team, [&](int64_t row, int64_t first, int64_t last) {
        float* x = args.x + row * args.d;
        over_row(first, last, [&](int64_t i, int n) {
            vf value = take(x + i, n), positive = max(value, zero()), negative = value - positive;
            put(x + i, above * positive * positive + below * (exponential(negative) - 1.0f - negative) + 0.5f * value, n);
        });
    });
}

inline void clip(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const ClipArguments*>(arguments);
    over_parts(rows, args.d, team, [&](int64_t row, int64_t first, int64_t last) {
        float* x = args.x + row * args.stride;
        over_row(first, last, [&](int64_t i, int n) {
            put(x + i, -max(-max(take(x + i, n), set1(-args.limit)), set1(-args.limit)), n);
        });
    });
}

inline void scale_rows(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const ScaleRowsArguments*>(arguments);
    over_parts(rows, args.d, team, [&](int64_t row, int64_t first, int64_t last) {
        float* x = args.x + row * args.stride;
        const float scale = args.table[args.index[row]];
        over_row(first, last, [&](int64_t i, int n) { put(x + i, take(x + i, n) * scale, n); });
    });
}

inline void gather_rows(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const GatherArguments*>(arguments);
    int64_t begin, end;
    team.share(rows, begin, end);
    for (int64_t row = begin; row < end; ++row)
        std::memcpy(args.out + row * args.d, args.x + args.index[row] * args.d, args.d * sizeof(float));
}

inline void scale_and_cap(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const ScaleAndCapArguments*>(arguments);
    over_parts(rows, args.d, team, [&](int64_t row, int64_t first, int64_t last) {
        float* x = args.x + row * args.d;
        over_row(first, last, [&](int64_t i, int n) {
            vf value = take(x + i, n) * args.scale;
            if (args.soft_cap > 0) value = args.soft_cap * hyperbolic_tangent(value / args.soft_cap);
            put(x + i, value, n);
        });
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
