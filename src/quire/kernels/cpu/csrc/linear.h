// Linear layers over packed weights, packing, and embeddings read from the packed layout.
//
// Packed [ceil(N / 16)] panels, each [ceil(K / 2)] pairs as `micro.h` says; missing rows and the odd k are zero.
#pragma once

#include <type_traits>

#include "arguments.h"
#include "micro.h"
#include "team.h"

namespace quire {
namespace QUIRE_ISA {

inline int64_t panel_elements(int64_t k) { return (k + 1) / 2 * 2 * PANEL; }

template <class T>
QUIRE_INLINE int64_t place_in_panel(int64_t k, int64_t lane) {
    return k / 2 * (2 * PANEL) + (k & 1) * PANEL + lane;
}
template <>
QUIRE_INLINE int64_t place_in_panel<bf16>(int64_t k, int64_t lane) {
    return k / 2 * (2 * PANEL) + lane * 2 + (k & 1);
}

// --- packing ------------------------------------------------------------------------------------------------------

// A whole panel of pairs: a pair is one 32-bit word, so that packing is a transposition of words, written line by line.
inline void pack_pairs(const bf16* source, int64_t stride, int64_t k, bf16* out) {
    constexpr int64_t BLOCK = 32;  // pairs; two cache lines of each of the sixteen rows
    for (int64_t p0 = 0; p0 < k / 2; p0 += BLOCK) {
        const int64_t count = k / 2 - p0 < BLOCK ? k / 2 - p0 : BLOCK;
        uint32_t words[PANEL][BLOCK];
        for (int64_t lane = 0; lane < PANEL; ++lane)
            std::memcpy(words[lane], source + lane * stride + p0 * 2, count * sizeof(uint32_t));
        for (int64_t p = 0; p < count; ++p) {
            uint32_t line[PANEL];
            for (int64_t lane = 0; lane < PANEL; ++lane) line[lane] = words[lane][p];
            std::memcpy(static_cast<void*>(out + (p0 + p) * 2 * PANEL), line, sizeof line);
        }
    }
}

template <class T>
void pack_typed(const PackArguments& args, int64_t begin, int64_t end) {
    const T* source = static_cast<const T*>(args.source);
    const int64_t size = panel_elements(args.k);
    for (int64_t panel = begin; panel < end; ++panel) {
        T* out = static_cast<T*>(args.packed) + panel * size;
        int64_t lanes = args.n - panel * PANEL < PANEL ? args.n - panel * PANEL : PANEL;
        if (lanes < PANEL || (args.k & 1)) std::memset(static_cast<void*>(out), 0, size * sizeof(T));
        if constexpr (std::is_same_v<T, bf16>) {
            if (lanes == PANEL && args.k % 2 == 0) {
                pack_pairs(source + panel * PANEL * args.source_stride, args.source_stride, args.k, out);
                continue;
            }
        }
        // A block of k keeps the sixteen source rows' lines in the first-level cache.
        for (int64_t k0 = 0; k0 < args.k; k0 += 64) {
            int64_t k1 = k0 + 64 < args.k ? k0 + 64 : args.k;
            for (int64_t lane = 0; lane < lanes; ++lane) {
                const T* row = source + (panel * PANEL + lane) * args.source_stride;
                for (int64_t k = k0; k < k1; ++k) out[place_in_panel<T>(k, lane)] = row[k];
            }
        }
    }
}

inline void pack(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const PackArguments*>(arguments);
    int64_t begin, end;
    team.share(rows, begin, end);  // as `linear` shares panels out, so that each thread touches its own memory first
    if (args.dtype == kBFloat16)
        pack_typed<bf16>(args, begin, end);
    else if (args.dtype == kFloat16)
        pack_typed<f16>(args, begin, end);
    else
        pack_typed<float>(args, begin, end);
}

// --- linear -------------------------------------------------------------------------------------------------------

constexpr int64_t BLOCK_K = W == 16 ? 512 : 384;     // a block of A and of B stay in the first two caches
constexpr int64_t BLOCK_ROWS = W == 16 ? 192 : 144;  // a multiple of MAX_ROWS
static_assert(BLOCK_K % Plain<float>::CHAIN == 0 && BLOCK_K % StepOf<bf16>::type::CHAIN == 0, "blocks are whole chains");
constexpr int64_t PREFETCH_BYTES = 1024;
constexpr int64_t SLAB_ROWS = 2048;  // rows of A that are held converted at once

// Stride of a converted row: an odd number of cache lines, so that a tile's rows do not fall into the same cache set.
constexpr int64_t converted_stride(int64_t k) { return (((k + 1) / 2 + 15) / 16 | 1) * 16; }

inline void add_bias(float* c, int64_t ldc, int64_t rows, const float* bias, int64_t columns) {
    for (int64_t m = 0; m < rows; ++m) {
        float* row = c + m * ldc;
        int64_t i = 0;
        for (; i + W <= columns; i += W) store(row + i, load(row + i) + load(bias + i));
        for (; i < columns; ++i) row[i] += bias[i];
    }
}

// Panels of 16-bit weights as float32 panels: over many rows, cheaper than splitting pairs in the inner loop; the same values
// enter the same chains, so results stay equal to the bit.
template <class T>
void expand_panel(const T* panel, int64_t pairs, float* out) {
    for (int64_t i = 0; i < pairs; ++i, panel += 2 * PANEL, out += 2 * PANEL)
        for (int v = 0; v < NV; ++v) {
            store(out + v * W, load_even(panel, v));
            store(out + PANEL + v * W, load_odd(panel, v));
        }
}

constexpr int64_t EXPAND_FROM_ROWS = 24;
constexpr int64_t EXPAND_PANELS = panels_for(MAX_ROWS);

template <class T>
void multiply_expanding(MicroCall call, int64_t rows, int64_t panels, Team& team) {
    const int64_t pairs = (call.k + 1) / 2, size = pairs * 2 * PANEL;
    float* expanded = team.own<float>(EXPAND_PANELS * size * sizeof(float));
    const T* b = static_cast<const T*>(call.b);
    const int64_t stride = call.panel_stride;
    float* c = call.c;
    call.b = expanded;
    call.panel_stride = size;
    for (int64_t panel = 0; panel < panels; panel += EXPAND_PANELS) {
        const int64_t count = panels - panel < EXPAND_PANELS ? panels - panel : EXPAND_PANELS;
        for (int64_t i = 0; i < count; ++i) expand_panel(b + (panel + i) * stride, pairs, expanded + i * size);
        call.c = c + panel * PANEL;
        multiply<float>(call, rows, count);
    }
}

template <class T>
void multiply_best(const MicroCall& call, int64_t rows, int64_t panels, Team& team) {
    if constexpr (sizeof(T) == 2 && !converts_a<T>()) {
        if (rows >= EXPAND_FROM_ROWS) return multiply_expanding<T>(call, rows, panels, team);
    }
    multiply<T>(call, rows, panels);
}

// Output of one group of panels whose last panel may be partial: whole panels go straight to `out`.
template <class T>
void multiply_group(MicroCall call, int64_t rows, int64_t first_panel, int64_t panels, int64_t k0,
                    const LinearArguments& args, float* out, Team& team) {
    const int64_t whole = args.n / PANEL, size = panel_elements(args.k);
    const T* packed = static_cast<const T*>(args.packed) + k0 * PANEL;
    int64_t direct = first_panel + panels <= whole ? panels : whole - first_panel;
    call.panel_stride = size;
    call.b = packed + first_panel * size;
    call.c = out + first_panel * PANEL;
    call.ldc = args.n;
    if (direct > 0) multiply_best<T>(call, rows, direct, team);
    if (direct < panels) {
        // The partial panel: through a tile of its own, since a whole panel would run into the next row.
        using S = typename StepOf<T>::type;
        alignas(64) float tile[MAX_ROWS * PANEL];
        const int64_t columns = args.n - whole * PANEL;
        float* c = out + whole * PANEL;
        const auto* a = static_cast<const typename S::AType*>(call.a);
        for (int64_t m0 = 0; m0 < rows; m0 += MAX_ROWS) {
            int64_t count = rows - m0 < MAX_ROWS ? rows - m0 : MAX_ROWS;
            if (call.accumulate)
                for (int64_t m = 0; m < count; ++m)
                    std::memcpy(tile + m * PANEL, c + (m0 + m) * args.n, columns * sizeof(float));
            MicroCall edge = call;
            edge.a = a + m0 * call.lda;
            edge.b = packed + whole * size;
            edge.c = tile;
            edge.ldc = PANEL;
            multiply<T>(edge, count, 1);
            for (int64_t m = 0; m < count; ++m)
                std::memcpy(c + (m0 + m) * args.n, tile + m * PANEL, columns * sizeof(float));
        }
    }
    if (args.bias && k0 + call.k == args.k) {
        int64_t column = first_panel * PANEL, last = column + panels * PANEL;
        add_bias(out + column, args.n, rows, args.bias + column, (last < args.n ? last : args.n) - column);
    }
}

// One tile of rows: every weight is read once, straight through, by the thread that owns its panels.
template <class T>
void linear_streaming(const LinearArguments& args, int64_t rows, Team& team) {
    const int64_t panels = (args.n + PANEL - 1) / PANEL;
    int64_t begin, end;
    team.share(panels, begin, end);
    if (begin == end) return;
    MicroCall call{};
    call.k = args.k;
    call.prefetch = PREFETCH_BYTES;
    call.a = args.x;
    call.lda = args.k;
    if (converts_a<T>()) {
        call.lda = converted_stride(args.k);
        auto* a = team.own<uint32_t>(rows * call.lda * sizeof(uint32_t));
        for (int64_t m = 0; m < rows; ++m) to_pairs(args.x + m * args.k, args.k, a + m * call.lda);
        call.a = a;
    }
    multiply_group<T>(call, rows, begin, end - begin, 0, args, args.out, team);
}

// Blocks of rows × groups of panels, taken by whoever is free. `a` holds `rows` rows as the step reads them.
template <class T>
void multiply_blocks(const LinearArguments& args, const typename StepOf<T>::type::AType* a, int64_t lda, int64_t rows,
                     float* out, Team& team) {
    using S = typename StepOf<T>::type;
    const int64_t panels = (args.n + PANEL - 1) / PANEL, row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t width = panels * row_blocks / (team.size * 4);  // panels a task: enough tasks to share evenly
    width = width < 1 ? 1 : width > 16 ? 16 : width;
    if (W == 16 && width > 1) width &= ~int64_t{1};
    const int64_t column_blocks = (panels + width - 1) / width;
    for (int64_t task; (task = team.next()) < row_blocks * column_blocks;) {
        int64_t row_block = task / column_blocks, first = task % column_blocks * width;
        int64_t count = panels - first < width ? panels - first : width;
        int64_t m0 = rows * row_block / row_blocks, m1 = rows * (row_block + 1) / row_blocks;
        for (int64_t k0 = 0; k0 < args.k; k0 += BLOCK_K) {
            MicroCall call{};
            call.k = args.k - k0 < BLOCK_K ? args.k - k0 : BLOCK_K;
            call.a = a + m0 * lda + k0 * S::PER_PAIR / 2;
            call.lda = lda;
            call.accumulate = k0 > 0;
            multiply_group<T>(call, m1 - m0, first, count, k0, args, out + m0 * args.n, team);
        }
    }
}

template <class T>
void linear_blocked(const LinearArguments& args, int64_t rows, Team& team) {
    if constexpr (!converts_a<T>()) {
        multiply_blocks<T>(args, args.x, args.k, rows, args.out, team);
    } else {
        const int64_t lda = converted_stride(args.k), slab = rows < SLAB_ROWS ? rows : SLAB_ROWS;
        auto* converted = team.common<uint32_t>(slab * lda * sizeof(uint32_t));
        for (int64_t first = 0; first < rows; first += slab) {
            const int64_t count = rows - first < slab ? rows - first : slab;
            if (first > 0) team.barrier();
            for (int64_t m; (m = team.next() * 8) < count;)
                for (int64_t r = m; r < m + 8 && r < count; ++r)
                    to_pairs(args.x + (first + r) * args.k, args.k, converted + r * lda);
            team.barrier();
            multiply_blocks<T>(args, converted, lda, count, args.out + first * args.n, team);
        }
    }
}

template <class T>
void linear_typed(const LinearArguments& args, int64_t rows, Team& team) {
    if (rows <= MAX_ROWS)
        linear_streaming<T>(args, rows, team);
    else
        linear_blocked<T>(args, rows, team);
}

inline void linear(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const LinearArguments*>(arguments);
    if (args.dtype == kBFloat16)
        linear_typed<bf16>(args, rows, team);
    else if (args.dtype == kFloat16)
        linear_typed<f16>(args, rows, team);
    else
        linear_typed<float>(args, rows, team);
}

// --- embeddings ---------------------------------------------------------------------------------------------------

template <class T>
void embedding_typed(const EmbeddingArguments& args, int64_t rows, Team& team) {
    const int64_t size = panel_elements(args.k);
    int64_t begin, end;
    // One row is worth sharing as well: it is spread over as many cache lines as pairs.
    int64_t parts = rows >= team.size ? 1 : team.size;
    team.share(rows * parts, begin, end);
    for (int64_t item = begin; item < end; ++item) {
        int64_t t = item / parts, part = item % parts;
        int64_t id = args.ids[t];
        float* out = args.out + t * args.k;
        if (id < 0 || id >= args.n) continue;
        const T* panel = static_cast<const T*>(args.packed) + id / PANEL * size;
        for (int64_t k = args.k * part / parts; k < args.k * (part + 1) / parts; ++k) {
            float value = to_float(panel[place_in_panel<T>(k, id % PANEL)]);
            out[k] = args.accumulate ? out[k] + value : value * args.scale;
        }
    }
}

inline void embedding(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const EmbeddingArguments*>(arguments);
    if (args.dtype == kBFloat16)
        embedding_typed<bf16>(args, rows, team);
    else if (args.dtype == kFloat16)
        embedding_typed<f16>(args, rows, team);
    else
        embedding_typed<float>(args, rows, team);
}

}  // namespace QUIRE_ISA
}  // namespace quire
