// Multi-head latent attention's own operations: a matrix a head, and what becomes of rotated parts and latents.
#pragma once

#include <algorithm>

#include "arguments.h"
#include "elementwise.h"
#include "linear.h"
#include "rope.h"
#include "team.h"

namespace quire {
namespace QUIRE_ISA {

struct HeadLinearArguments {  // rows: tokens; strides in elements
    const float* x;
    const void* packed;  // each head's panels, one head after the other
    float* out;
    int64_t heads, n, k, x_row, x_head, out_row, out_head;
    int32_t dtype;
};

constexpr int64_t HEAD_ROWS = 96;   // rows of one piece of work
constexpr int64_t HEAD_PANELS = 8;  // panels of one, where there are few rows

template <class T>
void head_linear_typed(const HeadLinearArguments& args, int64_t rows, Team& team) {
    using S = typename StepOf<T>::type;
    const int64_t panels = (args.n + PANEL - 1) / PANEL, whole = args.n / PANEL, size = panel_elements(args.k);
    const int64_t width = rows <= MAX_ROWS ? std::min(panels, HEAD_PANELS) : panels;
    const int64_t row_blocks = (rows + HEAD_ROWS - 1) / HEAD_ROWS, groups = (panels + width - 1) / width;
    const int64_t stride = converted_stride(args.k);
    for (int64_t task; (task = team.next()) < args.heads * row_blocks * groups;) {
        const int64_t head = task / (row_blocks * groups), block = task / groups % row_blocks, first = task % groups * width;
        const int64_t m0 = rows * block / row_blocks, count = rows * (block + 1) / row_blocks - m0;
        const int64_t last = std::min(first + width, panels), direct = std::min(last, whole) - first;
        const float* x = args.x + m0 * args.x_row + head * args.x_head;
        float* out = args.out + m0 * args.out_row + head * args.out_head;
        MicroCall call{};
        call.a = x;
        call.lda = args.x_row;
        if constexpr (converts_a<T>()) {
            auto* pairs = team.own<uint32_t>(count * stride * sizeof(uint32_t));
            for (int64_t m = 0; m < count; ++m) to_pairs(x + m * args.x_row, args.k, pairs + m * stride);
            call.a = pairs;
            call.lda = stride;
        }
        call.k = args.k;
        call.panel_stride = size;
        call.b = static_cast<const T*>(args.packed) + (head * panels + first) * size;
        call.c = out + first * PANEL;
        call.ldc = args.out_row;
        if (direct > 0) multiply_best<T>(call, count, direct, team);
        if (last > whole) {  // a panel of which not all columns exist
            alignas(64) float tile[MAX_ROWS * PANEL];
            const auto* a = static_cast<const typename S::AType*>(call.a);
            for (int64_t m = 0; m < count; m += MAX_ROWS) {
                const int64_t some = std::min<int64_t>(MAX_ROWS, count - m);
                MicroCall edge = call;
                edge.a = a + m * call.lda;
                edge.b = static_cast<const T*>(args.packed) + (head * panels + whole) * size;
                edge.c = tile;
                edge.ldc = PANEL;
                multiply<T>(edge, some, 1);
                for (int64_t i = 0; i < some; ++i)
                    std::memcpy(out + (m + i) * args.out_row + whole * PANEL, tile + i * PANEL,
                                (args.n - whole * PANEL) * sizeof(float));
            }
        }
    }
}

inline void head_linear(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const HeadLinearArguments*>(arguments);
    if (args.dtype == kBFloat16)
        head_linear_typed<bf16>(args, rows, team);
    else if (args.dtype == kFloat16)
        head_linear_typed<f16>(args, rows, team);
    else
        head_linear_typed<float>(args, rows, team);
}

struct LatentArguments {  // rows: tokens; strides in elements
    const float* q;
    const float* latent;
    const float* norm;
    const float* cos_sin;
    const int64_t* slot_mapping;
    const int32_t* positions;
    void* cache;
    float* out;
    int64_t heads, rank, rotary_dim, q_row, q_head, out_row, out_head, page_stride, block_size;
    int32_t interleaved, dtype;
    float eps;
};

template <class T>
void latent_typed(const LatentArguments& args, int64_t rows, Team& team) {
    const int64_t e = args.rotary_dim, columns = args.rank + e, items = args.heads + 1;
    int64_t begin, end;
    team.share(rows * items, begin, end);
    auto* kept = team.own<float>(columns * sizeof(float));
    for (int64_t item = begin; item < end; ++item) {
        const int64_t t = item / items, head = item % items;
        const float* cos_sin = args.cos_sin + static_cast<int64_t>(args.positions[t]) * e;
        if (head < args.heads) {
            float* out = args.out + t * args.out_row + head * args.out_head;
            std::memcpy(out, args.q + t * args.q_row + head * args.q_head, e * sizeof(float));
            rotate_head(out, cos_sin, e, args.interleaved);
            continue;
        }
        const int64_t slot = args.slot_mapping[t];
        if (slot < 0) continue;
        const float* latent = args.latent + t * columns;
        norm_head(latent, args.norm, args.rank, args.eps, kept);
        std::memcpy(kept + args.rank, latent + args.rank, e * sizeof(float));
        rotate_head(kept + args.rank, cos_sin, e, args.interleaved);
        T* out = static_cast<T*>(args.cache) + slot / args.block_size * args.page_stride + slot % args.block_size * columns;
        for (int64_t i = 0; i < columns; ++i) from_float(out + i, kept[i]);
    }
}

inline void latent_and_cache(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const LatentArguments*>(arguments);
    if (args.dtype == kBFloat16)
        latent_typed<bf16>(args, rows, team);
    else if (args.dtype == kFloat16)
        latent_typed<f16>(args, rows, team);
    else
        latent_typed<float>(args, rows, team);
}

}  // namespace QUIRE_ISA
}  // namespace quire
