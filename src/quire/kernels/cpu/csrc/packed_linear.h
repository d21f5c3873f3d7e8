// Products with packed weights. `packed_linear` rounds its input to int8, a block of columns at a time; `packed_linear_exact`
// makes float32 panels of the weights on the way and multiplies as `linear` does.
#pragma once

#include "linear.h"
#include "packed_micro.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t PACKED_BLOCK_BYTES = 512 << 10;  // rounded rows that stay in the second cache while panels pass

// Rows from a tile's first on, times some panels.
inline void packed_group(const PackedLinearArguments& args, const RoundedRows& x, int64_t first_row, int64_t rows, int64_t panel,
                         int64_t count, float* out) {
    const int64_t first_scale = panel * args.groups * PANEL;
    PackedCall call{};
    call.words = x.words;
    call.blocks = x.blocks;
    call.lines = args.block / columns_of_line(args.kind);
    call.panel_bytes = call.lines * x.blocks * LINE;
    call.codes = static_cast<const uint8_t*>(args.codes) + panel * call.panel_bytes;
    call.scale = static_cast<const char*>(args.scale) + first_scale * (args.half_scale ? 2 : 4);
    call.zero = args.zero ? static_cast<const char*>(args.zero) + first_scale * (args.half_zero ? 2 : 4) : nullptr;
    call.half_scale = args.half_scale;
    call.half_zero = args.half_zero;
    call.scale_stride = args.groups * PANEL;
    call.blocks_a_group = x.blocks / args.groups;
    call.digits = args.digits;
    call.bias = args.bias ? args.bias + panel * PANEL : nullptr;
    call.c = out + first_row * args.n + panel * PANEL;
    call.ldc = args.n;
    call.columns = args.n - panel * PANEL;
    packed_multiply(call, x, first_row, rows, args.kind, count);
}

inline void packed_linear(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const PackedLinearArguments*>(arguments);
    const int64_t blocks = (args.k + args.block - 1) / args.block, panels = (args.n + PANEL - 1) / PANEL;
    RoundedRows x{nullptr, rows, blocks * args.block / 4, blocks};
    const int64_t order_bytes = args.perm ? args.k * sizeof(float) : 0;
    if (rows == 1) {  // each thread rounds it for itself: sooner done than waited for
        x.data = team.own<int32_t>(x.bytes(1) + order_bytes);
        round_row(args, args.x, x, 0, reinterpret_cast<float*>(x.data + x.bytes(1) / sizeof(int32_t)));
        int64_t begin, end;
        team.share(panels, begin, end);
        packed_group(args, x, 0, 1, begin, end - begin, args.out);
        return;
    }
    const int64_t slab = rows < SLAB_ROWS ? rows : SLAB_ROWS;
    x.data = team.common<int32_t>(x.bytes(slab));
    auto* scratch = team.own<float>(order_bytes);
    int64_t tiles_a_block = PACKED_BLOCK_BYTES / (x.bytes(PACKED_ROWS));
    tiles_a_block = tiles_a_block < 1 ? 1 : tiles_a_block;
    for (int64_t first = 0; first < rows; first += slab) {
        x.rows = rows - first < slab ? rows - first : slab;
        const int64_t last_tile = (x.rows - 1) / PACKED_ROWS * PACKED_ROWS, end = last_tile + x.rows_of_tile(last_tile);
        if (first > 0) team.barrier();
        for (int64_t m; (m = team.next()) < end;) round_row(args, args.x + (first + m) * args.k, x, m, scratch);
        team.barrier();
        const int64_t tiles = last_tile / PACKED_ROWS + 1, row_blocks = (tiles + tiles_a_block - 1) / tiles_a_block;
        int64_t width = panels * row_blocks / (team.size * 4);  // panels a task: enough tasks to share evenly
        width = width < 1 ? 1 : width > 16 ? 16 : width >= 4 ? width & ~int64_t{3} : width;
        const int64_t column_blocks = (panels + width - 1) / width;
        for (int64_t task; (task = team.next()) < row_blocks * column_blocks;) {
            const int64_t row_block = task / column_blocks, panel = task % column_blocks * width;
            const int64_t m0 = tiles * row_block / row_blocks * PACKED_ROWS;
            const int64_t m1 = tiles * (row_block + 1) / row_blocks * PACKED_ROWS;
            packed_group(args, x, m0, (m1 < x.rows ? m1 : x.rows) - m0, panel,
                         panels - panel < width ? panels - panel : width, args.out + first * args.n);
        }
    }
}

// --- with inputs as they are --------------------------------------------------------------------------------------

constexpr int64_t DECODED_K = 128;  // columns of a group of panels that stay in the first cache
constexpr int64_t DECODED_PANELS = panels_for(1);

// The values of 4-bit codes, to be looked up in every lane by the low four bits.
struct ValueTable {
    float values[16];
    QUIRE_INLINE vf look_up(vu codes) const {
#if defined(__AVX512F__)
        return _mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(values));
#else
        vf found;
        for (int lane = 0; lane < W; ++lane) found[lane] = values[codes[lane] & 15];
        return found;
#endif
    }
};

// Columns [begin, end) of a panel as float32: (value - zero) * scale, in the layout that `multiply` reads. Begins at a line.
template <bool bytes>
void decode_panel(const PackedLinearArguments& args, int64_t panel, int64_t begin, int64_t end, float* out) {
    constexpr int columns = bytes ? 4 : 8;
    const int64_t lines = (args.k + args.block - 1) / args.block * args.block / columns;
    const int64_t group_columns = args.groups == 1 ? lines * columns : args.k / args.groups;
    const float code_zero = args.table ? 0.f : static_cast<float>(args.code_zero);
    const auto* codes = static_cast<const uint8_t*>(args.codes) + (panel * lines + begin / columns) * LINE;
    ValueTable table;
    for (int code = 0; code < 16; ++code) table.values[code] = args.table ? args.table[code] : code - code_zero;
    for (int64_t k = begin; k < end; k += columns, codes += LINE, out += columns * PANEL) {
        for (int v = 0; v < NV; ++v) {
            const int64_t place = (panel * args.groups + k / group_columns) * PANEL + v * W;
            const vf scale = load_scale(args.scale, place, args.half_scale) * args.scale_unit;
            const vf zeros = args.zero ? load_scale(args.zero, place, args.half_zero) : zero();
            const vu words = load_words(codes + v * W * 4);
#pragma GCC unroll 8
            for (int i = 0; i < columns; ++i) {
                vf value;
                if (bytes)
                    value = convert_int(bit_cast<vi>((UNSIGNED_BYTES ? words ^ 0x80808080u : words) << (24 - 8 * i)) >> 24) - code_zero;
                else if (W == 16 || args.table)
                    value = table.look_up(words >> (i < 4 ? 8 * i : 8 * (i - 4) + 4));
                else
                    value = convert_int(bit_cast<vi>(words >> (i < 4 ? 8 * i : 8 * (i - 4) + 4)) & 15) - code_zero;
                if (args.zero) value = value - zeros;
                store(out + i * PANEL + v * W, value * scale);
            }
        }
    }
}

inline void packed_linear_exact(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const PackedLinearArguments*>(arguments);
    const auto decode = args.kind == kBytes ? decode_panel<true> : decode_panel<false>;
    const int64_t panels = (args.n + PANEL - 1) / PANEL, groups = (panels + DECODED_PANELS - 1) / DECODED_PANELS;
    const float* x = args.x;
    if (args.perm) {
        auto* sorted = team.common<float>(rows * args.k * sizeof(float));
        for (int64_t m; (m = team.next()) < rows;)
            for (int64_t i = 0; i < args.k; ++i) sorted[m * args.k + i] = x[m * args.k + args.perm[i]];
        team.barrier();
        x = sorted;
    }
    constexpr int64_t size = DECODED_K * PANEL, ldc = DECODED_PANELS * PANEL;
    const int64_t row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    auto* decoded = team.own<float>((DECODED_PANELS * size + BLOCK_ROWS * ldc) * sizeof(float));
    float* const tile = decoded + DECODED_PANELS * size;
    for (int64_t task; (task = team.next()) < row_blocks * groups;) {
        const int64_t first = task % groups * DECODED_PANELS, row_block = task / groups;
        const int64_t count = panels - first < DECODED_PANELS ? panels - first : DECODED_PANELS;
        const int64_t m0 = rows * row_block / row_blocks, height = rows * (row_block + 1) / row_blocks - m0;
        MicroCall call{};
        call.lda = args.k;
        call.b = decoded;
        call.panel_stride = size;
        call.c = tile;
        call.ldc = ldc;
        for (int64_t k0 = 0; k0 < args.k; k0 += DECODED_K) {
            call.k = args.k - k0 < DECODED_K ? args.k - k0 : DECODED_K;
            for (int64_t p = 0; p < count; ++p) decode(args, first + p, k0, k0 + call.k, decoded + p * size);
            call.a = x + m0 * args.k + k0;
            call.accumulate = k0 > 0;
            multiply<float>(call, height, count);
        }
        const int64_t column = first * PANEL, exist = args.n - column < ldc ? args.n - column : ldc;
        for (int64_t m = 0; m < height; ++m) {
            float* out = args.out + (m0 + m) * args.n + column;
            std::memcpy(out, tile + m * ldc, exist * sizeof(float));
            if (args.bias) add_bias(out, args.n, 1, args.bias + column, exist);
        }
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
