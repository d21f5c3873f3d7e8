// Mixtures of experts: a token's choice, and the products of tokens with their experts' matrices.
//
// Pairs of a token and one of its experts are sorted by expert, so that a matrix is read once for all of its tokens, and a
// matrix that no token chose is not read at all. Every value is added up in the order of `micro.h` and of the token's choices: it
// depends neither on the other tokens nor on the number of threads.
#pragma once

#include <limits>

#include "elementwise.h"
#include "linear.h"

namespace quire {

enum Scoring : int32_t { kSoftmaxScores = 0, kSigmoidScores = 1, kSparsemixerScores = 2 };

struct RouteArguments {  // rows: tokens
    const float* logits;
    const float* bias;  // or nullptr
    int32_t* ids;
    float* weights;
    int64_t experts, top_k, groups, top_groups;
    int32_t scoring, renormalize;
    float scale, jitter;
};

struct ExpertsArguments {  // rows: tokens
    const float* x;
    const int32_t* ids;
    const float* weights;
    float* out;
    const void* gate_up;  // of each expert the gate's panels (if it has a gate), then up's, as `linear.h` packs them
    const void* down;
    const float* gate_up_bias;  // [experts, 2 * intermediate, or intermediate without gates] or nullptr
    const float* down_bias;     // [experts, d] or nullptr
    int64_t d, intermediate, experts, first, top_k;  // experts first to first + experts - 1 are here
    int32_t dtype, kind, gated, clamped, scales_input;
    float alpha, limit;
};

struct SigmoidGateArguments {  // rows: tokens; a gate a row, or `each` value has its own
    float* x;
    const float* gate;
    int64_t d, gate_stride;
    int32_t each;
};

namespace QUIRE_ISA {

// --- the choice ---------------------------------------------------------------------------------------------------

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

inline int64_t best_of(const float* values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; ++i)
        if (values[i] > values[best]) best = i;
    return best;
}

inline float logistic(float x) { return 1.f / (1.f + std::exp(-x)); }

// exp(x - largest) into `out`; returns their sum.
inline float exponentials(const float* x, float largest, int64_t count, float* out) {
    vf total = zero();
    over_row(0, count, [&](int64_t i, int n) {
        vf value = exponential(take(x + i, n) - largest);
        put(out + i, value, n);
        total = total + keep_lanes(value, n);
    });
    return sum(total);
}

inline void sparsemixer(const RouteArguments& args, const float* logits, int32_t* ids, float* weights, float* left) {
    std::memcpy(left, logits, args.experts * sizeof(float));
    for (int64_t k = 0; k < args.top_k; ++k) {
        const int64_t best = best_of(left, args.experts);
        const float top = left[best];
        float total = 0.f;
        for (int64_t e = 0; e < args.experts; ++e) {
            const float reach = 2.f * args.jitter * (std::fabs(logits[e]) > top ? std::fabs(logits[e]) : top);
            if (left[e] != LOWEST && !(top - logits[e] > reach)) total += std::exp(left[e] - top);
        }
        ids[k] = static_cast<int32_t>(best);
        weights[k] = args.scale / total;
        left[best] = LOWEST;
    }
}

// A group's worth is its largest rank, or with a bias the sum of its two largest; ranks outside of the best groups are lowered.
inline void close_groups(const RouteArguments& args, float* rank, float* worth) {
    const int64_t each = args.experts / args.groups;
    for (int64_t g = 0; g < args.groups; ++g) {
        float first = LOWEST, second = LOWEST;
        for (int64_t e = g * each; e < (g + 1) * each; ++e) {
            if (rank[e] > first) {
                second = first;
                first = rank[e];
            } else if (rank[e] > second) {
                second = rank[e];
            }
        }
        worth[g] = args.bias ? first + second : first;
    }
    for (int64_t closed = args.groups; closed > args.top_groups; --closed) {
        // The last of the least: of equals the first groups stay open.
        int64_t least = -1;
        for (int64_t g = 0; g < args.groups; ++g)
            if (worth[g] != std::numeric_limits<float>::infinity() && (least < 0 || worth[g] <= worth[least])) least = g;
        if (least < 0) return;
        worth[least] = std::numeric_limits<float>::infinity();
        for (int64_t e = least * each; e < (least + 1) * each; ++e) rank[e] = LOWEST;
    }
}

inline void moe_route(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const RouteArguments*>(arguments);
    const int64_t count = args.experts;
    float* rank = team.own<float>((2 * count + args.groups) * sizeof(float));
    float *scores = rank + count, *worth = scores + count;
    int64_t begin, end;
    team.share(rows, begin, end);
    for (int64_t t = begin; t < end; ++t) {
        const float* logits = args.logits + t * count;
        int32_t* ids = args.ids + t * args.top_k;
        float* weights = args.weights + t * args.top_k;
        if (args.scoring == kSparsemixerScores) {
            sparsemixer(args, logits, ids, weights, rank);
            continue;
        }
        float total = 1.f;
        if (args.scoring == kSoftmaxScores)
            total = exponentials(logits, logits[best_of(logits, count)], count, scores);
        else
            for (int64_t e = 0; e < count; ++e) scores[e] = logistic(logits[e]);
        for (int64_t e = 0; e < count; ++e) rank[e] = args.bias ? scores[e] / total + args.bias[e] : logits[e];
        if (args.top_groups < args.groups) close_groups(args, rank, worth);
        float chosen = 0.f;
        for (int64_t k = 0; k < args.top_k; ++k) {
            const int64_t best = best_of(rank, count);
            rank[best] = LOWEST;
            ids[k] = static_cast<int32_t>(best);
            weights[k] = scores[best];
            chosen += scores[best];
        }
        const float scale = args.scale / (args.renormalize ? chosen : total);
        for (int64_t k = 0; k < args.top_k; ++k) weights[k] *= scale;
    }
}

// --- the experts --------------------------------------------------------------------------------------------------

constexpr int64_t MAX_SLAB_BYTES = 128 << 20;  // buffers of the pairs that are computed together

// Where the pairs of a slab of tokens lie in the team's memory. Rows are pairs in the order of their experts.
template <class T>
struct Slab {
    using AType = typename StepOf<T>::type::AType;
    int64_t x_stride, activated_stride;
    int32_t *starts, *order, *places, *active;  // [E + 1], [P], [P], [E + 1]: their number first
    AType *x, *activated;
    float *gate, *up, *y;
    int64_t bytes;

    Slab(const ExpertsArguments& args, int64_t pairs, char* memory) {
        const bool converts = converts_a<T>();
        x_stride = converts ? converted_stride(args.d) : args.d;
        activated_stride = converts ? converted_stride(args.intermediate) : args.intermediate;
        bytes = 0;
        auto take_bytes = [&](int64_t size) {
            char* at = memory + bytes;
            bytes += (size + 63) / 64 * 64;
            return at;
        };
        starts = reinterpret_cast<int32_t*>(take_bytes((args.experts + 1) * 4));
        active = reinterpret_cast<int32_t*>(take_bytes((args.experts + 1) * 4));
        order = reinterpret_cast<int32_t*>(take_bytes(pairs * 4));
        places = reinterpret_cast<int32_t*>(take_bytes(pairs * 4));
        x = reinterpret_cast<AType*>(take_bytes(pairs * x_stride * 4));
        gate = reinterpret_cast<float*>(take_bytes(pairs * args.intermediate * 4));
        up = reinterpret_cast<float*>(take_bytes(pairs * args.intermediate * 4));
        activated = converts ? reinterpret_cast<AType*>(take_bytes(pairs * activated_stride * 4))
                             : reinterpret_cast<AType*>(gate);
        y = reinterpret_cast<float*>(take_bytes(pairs * args.d * 4));
    }
};

template <class T>
void sort_pairs(const ExpertsArguments& args, const Slab<T>& slab, const int32_t* ids, int64_t pairs) {
    int32_t* starts = slab.starts;
    std::memset(starts, 0, (args.experts + 1) * sizeof(int32_t));
    for (int64_t p = 0; p < pairs; ++p) {
        const int64_t expert = ids[p] - args.first;
        if (expert >= 0 && expert < args.experts) ++starts[expert + 1];
    }
    int32_t active = 0;
    for (int64_t e = 0; e < args.experts; ++e) {
        if (starts[e + 1]) slab.active[++active] = static_cast<int32_t>(e);
        starts[e + 1] += starts[e];
    }
    slab.active[0] = active;
    for (int64_t p = 0; p < pairs; ++p) {
        const int64_t expert = ids[p] - args.first;
        slab.places[p] = -1;
        if (expert < 0 || expert >= args.experts) continue;
        slab.places[p] = starts[expert]++;
        slab.order[slab.places[p]] = static_cast<int32_t>(p);
    }
    for (int64_t e = args.experts; e > 0; --e) starts[e] = starts[e - 1];
    starts[0] = 0;
}

template <class T>
void gather_pairs(const ExpertsArguments& args, const Slab<T>& slab, const float* x, const float* weights, Team& team) {
    int64_t begin, end;
    team.share(slab.starts[args.experts], begin, end);
    for (int64_t r = begin; r < end; ++r) {
        const float* row = x + slab.order[r] / args.top_k * args.d;
        if (args.scales_input) {
            float* scaled = slab.y + r * args.d;
            const float weight = weights[slab.order[r]];
            over_row(0, args.d, [&](int64_t i, int n) { put(scaled + i, take(row + i, n) * weight, n); });
            row = scaled;
        }
        if constexpr (converts_a<T>())
            to_pairs(row, args.d, slab.x + r * slab.x_stride);
        else
            std::memcpy(slab.x + r * slab.x_stride, row, args.d * sizeof(float));
    }
}

// Some panels of a matrix for all of an expert's rows.
template <class T>
void multiply_rows(const LinearArguments& args, const typename StepOf<T>::type::AType* a, int64_t lda, int64_t rows,
                   int64_t first_panel, int64_t panels, Team& team) {
    using S = typename StepOf<T>::type;
    MicroCall call{};
    call.lda = lda;
    if (rows <= MAX_ROWS) {
        call.k = args.k;
        call.a = a;
        call.prefetch = PREFETCH_BYTES;
        multiply_group<T>(call, rows, first_panel, panels, 0, args, args.out, team);
        return;
    }
    for (int64_t m0 = 0; m0 < rows; m0 += BLOCK_ROWS) {
        const int64_t count = rows - m0 < BLOCK_ROWS ? rows - m0 : BLOCK_ROWS;
        for (int64_t k0 = 0; k0 < args.k; k0 += BLOCK_K) {
            call.k = args.k - k0 < BLOCK_K ? args.k - k0 : BLOCK_K;
            call.a = a + m0 * lda + k0 * S::PER_PAIR / 2;
            call.accumulate = k0 > 0;
            multiply_group<T>(call, count, first_panel, panels, k0, args, args.out + m0 * args.n, team);
        }
    }
}

template <int kind>
void activate_block(float* gate, const float* up, int64_t begin, int64_t end) {
    over_row(begin, end, [&](int64_t i, int n) {
        const vf value = activate<kind>(take(gate + i, n));
        put(gate + i, up ? value * take(up + i, n) : value, n);
    });
}

// gate = what the expert makes of gate and up, in place; without gates `up` is nullptr, and what it were stands in `gate`.
inline void activate_pair(const ExpertsArguments& args, float* gate, const float* up, int64_t begin, int64_t end) {
    if (args.clamped) {
        const vf limit = set1(args.limit);
        const float offset = args.clamped == 1 ? 1.0f : 0.0f;
        over_row(begin, end, [&](int64_t i, int n) {
            vf g = min(take(gate + i, n), limit), u = max(min(take(up + i, n), limit), -limit);
            put(gate + i, g / (1.0f + exponential(-args.alpha * g)) * (u + offset), n);
        });
        return;
    }
    with_kind(args.kind, [&](auto kind) { activate_block<kind.value>(gate, up, begin, end); });
}

// Active experts × blocks of panels, taken by whoever is free. body(expert, first panel, panels).
template <class Body>
void over_experts(const int32_t* active, int64_t panels, Team& team, Body body) {
    int64_t width = panels * active[0] / (team.size * 4);  // panels a task: enough tasks to share evenly
    width = width < 1 ? 1 : width > 16 ? 16 : width;
    if (W == 16 && width > 1) width &= ~int64_t{1};
    const int64_t blocks = (panels + width - 1) / width;
    for (int64_t task; (task = team.next()) < active[0] * blocks;) {
        const int64_t first = task % blocks * width;
        body(active[1 + task / blocks], first, panels - first < width ? panels - first : width);
    }
}

template <class T>
void multiply_gate_up(const ExpertsArguments& args, const Slab<T>& slab, Team& team) {
    const int64_t size = args.intermediate, panels = (size + PANEL - 1) / PANEL, stride = panel_elements(args.d);
    const int64_t matrices = args.gated ? 2 : 1;
    over_experts(slab.active, panels, team, [&](int64_t e, int64_t first, int64_t count) {
        const int64_t start = slab.starts[e], rows = slab.starts[e + 1] - start;
        const T* packed = static_cast<const T*>(args.gate_up) + e * matrices * panels * stride;
        const float* bias = args.gate_up_bias ? args.gate_up_bias + e * matrices * size : nullptr;
        const auto* x = slab.x + start * slab.x_stride;
        float *gate = slab.gate + start * size, *up = args.gated ? slab.up + start * size : nullptr;
        LinearArguments product{nullptr, packed, bias, gate, size, args.d, args.dtype};
        multiply_rows<T>(product, x, slab.x_stride, rows, first, count, team);
        if (up) {
            product.packed = packed + panels * stride;
            product.bias = bias ? bias + size : nullptr;
            product.out = up;
            multiply_rows<T>(product, x, slab.x_stride, rows, first, count, team);
        }
        const int64_t begin = first * PANEL, last = begin + count * PANEL, end = last < size ? last : size;
        for (int64_t r = 0; r < rows; ++r) {
            activate_pair(args, gate + r * size, up ? up + r * size : nullptr, begin, end);
            if constexpr (converts_a<T>())
                to_pairs(gate + r * size + begin, end - begin,
                         slab.activated + (start + r) * slab.activated_stride + begin / 2);
        }
    });
}

template <class T>
void multiply_down(const ExpertsArguments& args, const Slab<T>& slab, Team& team) {
    const int64_t panels = (args.d + PANEL - 1) / PANEL, stride = panel_elements(args.intermediate);
    over_experts(slab.active, panels, team, [&](int64_t e, int64_t first, int64_t count) {
        const int64_t start = slab.starts[e], rows = slab.starts[e + 1] - start;
        const LinearArguments product{nullptr,
                                      static_cast<const T*>(args.down) + e * panels * stride,
                                      args.down_bias ? args.down_bias + e * args.d : nullptr,
                                      slab.y + start * args.d,
                                      args.d,
                                      args.intermediate,
                                      args.dtype};
        multiply_rows<T>(product, slab.activated + start * slab.activated_stride, slab.activated_stride, rows, first,
                         count, team);
    });
}

template <class T>
void combine_pairs(const ExpertsArguments& args, const Slab<T>& slab, const float* weights, float* out, int64_t tokens,
                   Team& team) {
    over_parts(tokens, args.d, team, [&](int64_t t, int64_t first, int64_t last) {
        over_row(first, last, [&](int64_t i, int n) {
            vf total = zero();
            for (int64_t p = t * args.top_k; p < (t + 1) * args.top_k; ++p) {
                if (slab.places[p] < 0) continue;
                const vf value = take(slab.y + slab.places[p] * args.d + i, n);
                total = args.scales_input ? total + value : fma(value, set1(weights[p]), total);
            }
            put(out + t * args.d + i, total, n);
        });
    });
}

template <class T>
void experts_typed(const ExpertsArguments& args, int64_t rows, Team& team) {
    const int64_t pair_bytes = Slab<T>(args, 1, nullptr).bytes - Slab<T>(args, 0, nullptr).bytes;
    int64_t most = MAX_SLAB_BYTES / (pair_bytes * args.top_k);
    most = most < 1 ? 1 : most < rows ? most : rows;
    const Slab<T> slab(args, most * args.top_k,
                       team.common<char>(Slab<T>(args, most * args.top_k, nullptr).bytes));
    for (int64_t token = 0; token < rows; token += most) {
        const int64_t tokens = rows - token < most ? rows - token : most;
        const float *x = args.x + token * args.d, *weights = args.weights + token * args.top_k;
        if (token > 0) team.barrier();
        if (team.index == 0) sort_pairs(args, slab, args.ids + token * args.top_k, tokens * args.top_k);
        team.barrier();
        gather_pairs(args, slab, x, weights, team);
        team.barrier();
        multiply_gate_up(args, slab, team);
        team.barrier();
        multiply_down(args, slab, team);
        team.barrier();
        combine_pairs(args, slab, weights, args.out + token * args.d, tokens, team);
    }
}

inline void moe_experts(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const ExpertsArguments*>(arguments);
    if (rows == 0) return;
    if (args.dtype == kBFloat16)
        experts_typed<bf16>(args, rows, team);
    else if (args.dtype == kFloat16)
        experts_typed<f16>(args, rows, team);
    else
        experts_typed<float>(args, rows, team);
}

inline void sigmoid_gate(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const SigmoidGateArguments*>(arguments);
    over_parts(rows, args.d, team, [&](int64_t row, int64_t first, int64_t last) {
        const float* gate = args.gate + row * args.gate_stride;
        float* x = args.x + row * args.d;
        if (args.each) {
            over_row(first, last, [&](int64_t i, int n) {
                put(x + i, take(x + i, n) / (1.0f + exponential(-take(gate + i, n))), n);
            });
            return;
        }
        const float share = logistic(*gate);
        over_row(first, last, [&](int64_t i, int n) { put(x + i, take(x + i, n) * share, n); });
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
