// The inner kernel of packed weights: C [MR, 16 * NP] = x * W, with x in int8 by blocks of columns and codes as they lie in memory.
//
// A block's products are summed in whole numbers, exactly; every element of C is ONE chain of fused multiply-adds over the blocks
// in their order. So its value does not depend on MR, NP, the number of threads or the other rows of the batch.
#pragma once

#include "packed.h"

namespace quire {
namespace QUIRE_ISA {

struct PackedCall {
    const int32_t* x;  // a tile of rows
    int64_t words, blocks;
    const uint8_t* codes;  // of the first panel
    int64_t panel_bytes, lines;  // lines a block
    const void* scale;           // [panels][groups][16]; likewise zero
    const void* zero;
    bool half_scale, half_zero;
    int64_t scale_stride, blocks_a_group;
    const uint8_t* digits;
    const float* bias;  // of the first panel
    float* c;
    int64_t ldc, rows, columns;  // that exist
};

template <int KIND, int MR, int NP>
void packed_micro(const PackedCall& call) {
    constexpr int digits = KIND == kTwoDigits ? 2 : 1, words_a_line = KIND == kBytes ? 1 : 2;
    constexpr int64_t ahead = 1024, ahead_groups = 8;
    const int32_t* x = call.x;
    const int32_t* starts = call.x + (call.words + 2 * call.blocks) * MR;
    const auto* scales = reinterpret_cast<const float*>(call.x + call.words * MR);
    const float* negative_sums = scales + call.blocks * MR;
    const uint8_t* codes = call.codes;
    const ByteTable table(call.digits), second_table(call.digits + 16);
    vf acc[MR][NP][NV] = {};
    int64_t group = 0, left = call.blocks_a_group;
    for (int64_t b = 0; b < call.blocks; ++b) {
        vi sums[digits][MR][NP][NV];
#pragma GCC unroll 12
        for (int m = 0; m < MR; ++m) {
            const vi start = set1_int(starts[m]);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p)
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) {
                    if (digits == 2) sums[0][m][p][v] = vi{};
                    sums[digits - 1][m][p][v] = start;
                }
        }
        if (MR * NP <= 8) {
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) {
                const int64_t place = p * call.scale_stride + (group + ahead_groups) * PANEL;
                __builtin_prefetch(static_cast<const char*>(call.scale) + place * (call.half_scale ? 2 : 4));
            }
        }
        for (int64_t line = 0; line < call.lines; ++line, codes += LINE, x += words_a_line * MR) {
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) {
                const uint8_t* from = codes + p * call.panel_bytes;
                if (MR * NP <= 8) __builtin_prefetch(from + ahead);
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) {
                    const vu w = load_words(from + v * W * 4);
                    if (KIND == kBytes) {
#pragma GCC unroll 12
                        for (int m = 0; m < MR; ++m)
                            sums[0][m][p][v] = dot_bytes<true>(sums[0][m][p][v], w, x[m]);
                        continue;
                    }
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half) {
                        const vu code = (half ? w >> 4 : w) & 0x0f0f0f0fu;
                        const vu number = KIND == kNibbles ? code : table.look_up(code);
                        const vu second = KIND == kTwoDigits ? second_table.look_up(code) : code;
#pragma GCC unroll 12
                        for (int m = 0; m < MR; ++m) {
                            const int32_t factor = x[half * MR + m];
                            sums[0][m][p][v] = dot_bytes<false>(sums[0][m][p][v], number, factor);
                            if (digits == 2)
                                sums[digits - 1][m][p][v] = dot_bytes<false>(sums[digits - 1][m][p][v], second, factor);
                        }
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) {
                const int64_t place = p * call.scale_stride + group * PANEL + v * W;
                const vf scale = load_scale(call.scale, place, call.half_scale);
                const vf zeros = call.zero ? load_scale(call.zero, place, call.half_zero) : zero();
#pragma GCC unroll 12
                for (int m = 0; m < MR; ++m) {
                    vi sum = sums[0][m][p][v];
                    if (digits == 2) sum = sum * 128 + sums[digits - 1][m][p][v];
                    vf part = convert_int(sum);
                    if (call.zero) part = fma(zeros, set1(negative_sums[m]), part);
                    acc[m][p][v] = fma(part, scale * scales[m], acc[m][p][v]);
                }
            }
        starts += MR, scales += MR, negative_sums += MR;
        if (--left == 0) ++group, left = call.blocks_a_group;
    }
    for (int p = 0; p < NP; ++p)
        for (int v = 0; v < NV; ++v) {
            const int64_t column = p * PANEL + v * W, exist = call.columns - column;
            const int count = exist < W ? static_cast<int>(exist) : W;
            if (count <= 0) continue;
            const vf bias = !call.bias ? zero() : count < W ? load_some(call.bias + column, count) : load(call.bias + column);
            for (int m = 0; m < MR && m < call.rows; ++m) {
                float* to = call.c + m * call.ldc + column;
                if (count == W)
                    store(to, acc[m][p][v] + bias);
                else
                    store_some(to, acc[m][p][v] + bias, count);
            }
        }
}

// Panels at once for so many rows: within the registers, and enough streams for few rows.
constexpr int packed_panels(int rows) { return W == 16 ? (rows <= 3 ? 4 : rows <= 6 ? 2 : 1) : rows == 1 ? 2 : 1; }

using PackedMicro = void (*)(const PackedCall&);

template <int KIND>
PackedMicro packed_micro_for(int rows, bool wide) {
#define QUIRE_ROWS(MR) \
    case MR: return wide ? packed_micro<KIND, MR, packed_panels(MR)> : packed_micro<KIND, MR, 1>;
    switch (rows) {
        QUIRE_ROWS(1)
        QUIRE_ROWS(2)
        QUIRE_ROWS(3)
        QUIRE_ROWS(4)
    }
    if constexpr (W == 16) {
        switch (rows) {
            QUIRE_ROWS(6)
            QUIRE_ROWS(8)
            QUIRE_ROWS(12)
        }
    }
#undef QUIRE_ROWS
    __builtin_unreachable();
}

inline PackedMicro packed_micro_for(int kind, int rows, bool wide) {
    switch (kind) {
        case kNibbles: return packed_micro_for<kNibbles>(rows, wide);
        case kOneDigit: return packed_micro_for<kOneDigit>(rows, wide);
        case kTwoDigits: return packed_micro_for<kTwoDigits>(rows, wide);
    }
    return packed_micro_for<kBytes>(rows, wide);
}

// C of `rows` rows from a tile's first on, and any number of panels.
inline void packed_multiply(PackedCall call, const RoundedRows& x, int64_t first_row, int64_t rows, int kind, int64_t panels) {
    const int64_t scale_bytes = call.scale_stride * (call.half_scale ? 2 : 4);
    const int64_t zero_bytes = call.scale_stride * (call.half_zero ? 2 : 4);
    float* const c = call.c;
    int64_t group = packed_panels(x.rows_of_tile(first_row));
    for (int64_t panel = 0, width; panel < panels; panel += width) {
        width = panels - panel < group ? 1 : group;
        for (int64_t row = 0; row < rows; row += PACKED_ROWS) {
            const int count = x.rows_of_tile(first_row + row);
            const bool wide = packed_panels(count) <= width;
            call.x = x.tile(first_row + row);
            call.rows = rows - row;
            const PackedMicro micro = packed_micro_for(kind, count, wide);
            const int64_t once = wide ? packed_panels(count) : 1;
            for (int64_t p = 0; p < width; p += once) {
                PackedCall part = call;
                part.codes += p * call.panel_bytes;
                part.scale = static_cast<const char*>(call.scale) + p * scale_bytes;
                part.zero = call.zero ? static_cast<const char*>(call.zero) + p * zero_bytes : nullptr;
                part.bias = call.bias ? call.bias + p * PANEL : nullptr;
                part.c = c + row * call.ldc + (panel + p) * PANEL;
                part.columns -= p * PANEL;
                micro(part);
            }
        }
        call.codes += width * call.panel_bytes;
        call.scale = static_cast<const char*>(call.scale) + width * scale_bytes;
        if (call.zero) call.zero = static_cast<const char*>(call.zero) + width * zero_bytes;
        if (call.bias) call.bias += width * PANEL;
        call.columns -= width * PANEL;
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
