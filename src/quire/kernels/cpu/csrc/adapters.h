// Low-rank updates of adapters: each row has a slot, and the slot's numbers are found through a table of addresses.
//
// Rows that follow one another with the same slot are taken four at a time. Few rows are shared out by the ranks or outputs
// that they need, many by rows.
#pragma once

#include "arguments.h"
#include "elementwise.h"
#include "simd.h"
#include "team.h"

namespace quire {
namespace QUIRE_ISA {

struct AdapterArguments {  // rows: tokens, or rows of logits
    const float* x;        // of a shrink: [rows, k]
    const int32_t* ids;    // of a lookup
    float* h;              // [rows, h_stride]
    float* out;            // of an expand: [rows, n]
    const int32_t* slots;
    const int64_t* entries;  // [6, num_slots]: down, up, rank, segments, gain, shift
    const int32_t* tiles;    // (segment, first output, outputs)
    int64_t k, n, h_stride, num_slots, num_segments, num_tiles;
    float scale;
    int32_t dtype;
};

constexpr int64_t ADAPTER_ROWS = 4;
constexpr int64_t ADAPTER_TILE = 64;

struct AdapterSlot {
    const void *down, *up;
    int64_t rank, segments;
    const float *gain, *shift;
    QUIRE_INLINE AdapterSlot(const AdapterArguments& args, int64_t slot) {
        auto field = [&](int64_t i) { return args.entries[i * args.num_slots + slot]; };
        down = reinterpret_cast<const void*>(field(0));
        up = reinterpret_cast<const void*>(field(1));
        rank = field(2);
        segments = field(3);
        gain = reinterpret_cast<const float*>(field(4));
        shift = reinterpret_cast<const float*>(field(5));
    }
};

// Rows [begin, end) in groups of one slot: body(slot, first row, rows). Rows without an adapter are passed over.
template <class Body>
QUIRE_INLINE void over_slots(const AdapterArguments& args, int64_t begin, int64_t end, Body body) {
    for (int64_t t = begin; t < end;) {
        const int32_t slot = args.slots[t];
        int64_t last = t + 1;
        while (last < end && last - t < ADAPTER_ROWS && args.slots[last] == slot) ++last;
        if (slot > 0) {
            AdapterSlot entry(args, slot);
            if (entry.rank > 0 || entry.gain) body(entry, t, last - t);
        }
        t = last;
    }
}

// Dot products of `ROWS` rows of x with `LINES` lines of down, which lie side by side in memory.
template <class T, int ROWS, int LINES>
QUIRE_INLINE void shrink_block(const float* x, int64_t k, const T* down, float* h, int64_t h_stride) {
    vf sums[ROWS][LINES] = {};
    int64_t i = 0;
    for (; i + W <= k; i += W) {
        vf line[LINES];
        for (int l = 0; l < LINES; ++l) line[l] = load(down + l * k + i);
        for (int r = 0; r < ROWS; ++r) {
            vf value = load(x + r * k + i);
            for (int l = 0; l < LINES; ++l) sums[r][l] = fma(value, line[l], sums[r][l]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int l = 0; l < LINES; ++l) {
            float total = sum(sums[r][l]);
            for (int64_t j = i; j < k; ++j) total += x[r * k + j] * to_float(down[l * k + j]);
            h[r * h_stride + l] = total;
        }
}

template <class T, int ROWS>
void shrink_rows(const float* x, int64_t k, const T* down, int64_t lines, float* h, int64_t h_stride) {
    int64_t l = 0;
    for (; l + 4 <= lines; l += 4) shrink_block<T, ROWS, 4>(x, k, down + l * k, h + l, h_stride);
    for (; l < lines; ++l) shrink_block<T, ROWS, 1>(x, k, down + l * k, h + l, h_stride);
}

template <class T>
void adapter_shrink_typed(const AdapterArguments& args, int64_t rows, Team& team) {
    const bool by_rows = rows >= 4 * ADAPTER_ROWS * team.size;
    int64_t begin = 0, end = rows;
    if (by_rows) team.share(rows, begin, end);
    over_slots(args, begin, end, [&](const AdapterSlot& slot, int64_t t, int64_t count) {
        for (int64_t segment = 0; segment < args.num_segments; ++segment) {
            if (!(slot.segments >> segment & 1)) continue;
            int64_t first = 0, last = slot.rank;
            if (!by_rows) team.share(slot.rank, first, last);
            const int64_t line = segment * slot.rank + first, lines = last - first;
            const T* down = static_cast<const T*>(slot.down) + line * args.k;
            const float* x = args.x + t * args.k;
            float* h = args.h + t * args.h_stride + line;
            if (count == 4)
                shrink_rows<T, 4>(x, args.k, down, lines, h, args.h_stride);
            else
                for (int64_t r = 0; r < count; ++r)
                    shrink_rows<T, 1>(x + r * args.k, args.k, down, lines, h + r * args.h_stride, args.h_stride);
        }
    });
}

// One tile of outputs of `ROWS` rows: all of a tile's sums stay in registers while the ranks are gone through.
template <class T, int ROWS>
void expand_tile(const AdapterArguments& args, const AdapterSlot& slot, int64_t t, const int32_t* tile) {
    const int64_t segment = tile[0], first = tile[1], end = tile[1] + tile[2];
    const bool is_updated = slot.segments >> segment & 1;
    const T* up = static_cast<const T*>(slot.up);
    const float* h = args.h + t * args.h_stride + segment * slot.rank;
    constexpr int VECTORS = ROWS == 1 ? 4 : 2;
    for (int64_t n = first; n < end; n += VECTORS * W) {
        const int64_t width = end - n < VECTORS * W ? end - n : VECTORS * W;
        if (width == VECTORS * W && is_updated) {
            vf sums[ROWS][VECTORS] = {};
            for (int64_t r = 0; r < slot.rank; ++r) {
                // Lines of one tile are far apart: no prefetcher of a processor sees that the next tile's are beside them.
                const char* beside = reinterpret_cast<const char*>(up + r * args.n + n + VECTORS * W);
                for (size_t byte = 0; byte < VECTORS * W * sizeof(T); byte += 64) __builtin_prefetch(beside + byte);
                vf line[VECTORS];
                for (int v = 0; v < VECTORS; ++v) line[v] = load(up + r * args.n + n + v * W);
                for (int m = 0; m < ROWS; ++m) {
                    const vf value = set1(h[m * args.h_stride + r]);
                    for (int v = 0; v < VECTORS; ++v) sums[m][v] = fma(value, line[v], sums[m][v]);
                }
            }
            for (int m = 0; m < ROWS; ++m)
                for (int v = 0; v < VECTORS; ++v) {
                    float* out = args.out + (t + m) * args.n + n + v * W;
                    vf value = load(out);
                    if (slot.gain) value = fma(value, load(slot.gain + n + v * W), load(slot.shift + n + v * W));
                    store(out, fma(sums[m][v], set1(args.scale), value));
                }
            continue;
        }
        for (int m = 0; m < ROWS; ++m)
            for (int64_t i = n; i < n + width; ++i) {
                float* out = args.out + (t + m) * args.n + i;
                float value = slot.gain ? *out * slot.gain[i] + slot.shift[i] : *out, total = 0.f;
                for (int64_t r = 0; is_updated && r < slot.rank; ++r)
                    total += h[m * args.h_stride + r] * to_float(up[r * args.n + i]);
                *out = value + args.scale * total;
            }
    }
}

template <class T>
void adapter_expand_typed(const AdapterArguments& args, int64_t rows, Team& team) {
    const bool by_rows = rows >= 4 * ADAPTER_ROWS * team.size;
    int64_t begin = 0, end = rows, first = 0, last = args.num_tiles;
    if (by_rows)
        team.share(rows, begin, end);
    else
        team.share(args.num_tiles, first, last);
    over_slots(args, begin, end, [&](const AdapterSlot& slot, int64_t t, int64_t count) {
        for (int64_t tile = first; tile < last; ++tile) {
            if (count == 4)
                expand_tile<T, 4>(args, slot, t, args.tiles + 3 * tile);
            else
                for (int64_t r = 0; r < count; ++r) expand_tile<T, 1>(args, slot, t + r, args.tiles + 3 * tile);
        }
    });
}

template <class T>
void adapter_lookup_typed(const AdapterArguments& args, int64_t rows, Team& team) {
    int64_t begin, end;
    team.share(rows, begin, end);
    for (int64_t t = begin; t < end; ++t) {
        if (args.slots[t] <= 0) continue;
        const AdapterSlot slot(args, args.slots[t]);
        const T* line = static_cast<const T*>(slot.down) + args.ids[t] * slot.rank;
        for (int64_t r = 0; r < slot.rank; ++r) args.h[t * args.h_stride + r] = to_float(line[r]);
    }
}

#define QUIRE_ADAPTER(name)                                                       \
    inline void name(const void* arguments, int64_t rows, Team& team) {           \
        const auto& args = *static_cast<const AdapterArguments*>(arguments);      \
        if (args.dtype == kBFloat16)                                              \
            name##_typed<bf16>(args, rows, team);                                 \
        else if (args.dtype == kFloat16)                                          \
            name##_typed<f16>(args, rows, team);                                  \
        else                                                                      \
            name##_typed<float>(args, rows, team);                                \
    }

QUIRE_ADAPTER(adapter_shrink)
QUIRE_ADAPTER(adapter_lookup)
QUIRE_ADAPTER(adapter_expand)
#undef QUIRE_ADAPTER

}  // namespace QUIRE_ISA
}  // namespace quire
