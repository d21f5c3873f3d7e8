// Attention over pages, prefill and decode alike: online softmax (Milakov and Gimelshein, 2018) over tiles of keys, all
// query heads of a key head together, both products through the panel kernel of `micro.h`.
//
// A query's result does not depend on its neighbours in the batch, on chunking or on threads: tiles and splits of the keys lie
// at fixed positions, splits are merged in order whether one thread or several computed them, and masked keys add exactly 0.
#pragma once

#include <algorithm>
#include <cmath>

#include "arguments.h"
#include "elementwise.h"
#include "micro.h"
#include "team.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t KEY_TILE = 128;
static_assert(KEY_TILE <= Plain<float>::CHAIN, "where a tile's first visible key lies would move the borders of chains");
// From a panel of values to the next, a line more than they hold: a power of two would put all panels into the same cache sets.
constexpr int64_t VALUES_STRIDE = (KEY_TILE + 2) * PANEL;
constexpr int64_t KEY_SPLIT = 1024;  // a multiple of KEY_TILE
constexpr int64_t MOST_BLOCK_ROWS = 128;  // query rows (tokens × heads of the group) that share a pass over the keys
constexpr size_t MOST_SPLIT_BYTES = size_t{64} << 20;

template <class T>
struct PanelOf {
    using type = float;
};
template <>
struct PanelOf<bf16> {
    using type = bf16;
};

// --- bringing keys and values into panels -------------------------------------------------------------------------

#if defined(__AVX2__)
QUIRE_INLINE void transpose_8x8(__m256 (&r)[8]) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}
QUIRE_INLINE __m256 load_8(const float* p) { return _mm256_loadu_ps(p); }
QUIRE_INLINE __m256 load_8(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#endif

// Sixteen rows of keys become one panel [h, 16]: 32-bit units (a pair of bfloat16, or one float) are transposed.
inline void keys_to_panel(const bf16* const (&rows)[PANEL], int64_t h, bf16* panel) {
    auto* out = reinterpret_cast<uint32_t*>(panel);
    int64_t i = 0;
#if defined(__AVX2__)
    // Eight rows after the other eight: so many pointers stay in registers.
    for (int half = 0; half < 16; half += 8) {
        const bf16 *r0 = rows[half], *r1 = rows[half + 1], *r2 = rows[half + 2], *r3 = rows[half + 3], *r4 = rows[half + 4],
                   *r5 = rows[half + 5], *r6 = rows[half + 6], *r7 = rows[half + 7];
        auto load_bits = [](const bf16* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); };
        for (i = 0; i + 16 <= h; i += 16) {
            __m256 r[8] = {load_bits(r0 + i), load_bits(r1 + i), load_bits(r2 + i), load_bits(r3 + i),
                           load_bits(r4 + i), load_bits(r5 + i), load_bits(r6 + i), load_bits(r7 + i)};
            transpose_8x8(r);
            for (int j = 0; j < 8; ++j) _mm256_storeu_ps(reinterpret_cast<float*>(out + (i / 2 + j) * PANEL + half), r[j]);
        }
    }
#endif
    for (; i < h; i += 2)
        for (int j = 0; j < PANEL; ++j) {
            uint32_t high = i + 1 < h ? rows[j][i + 1].bits : 0;
            out[i / 2 * PANEL + j] = rows[j][i].bits | (high << 16);
        }
}
template <class T>
void keys_to_panel(const T* const (&rows)[PANEL], int64_t h, float* panel) {
    int64_t i = 0;
#if defined(__AVX2__)
    for (; i + 8 <= h; i += 8) {
        for (int half = 0; half < 2; ++half) {
            __m256 r[8];
            for (int j = 0; j < 8; ++j) r[j] = load_8(rows[half * 8 + j] + i);
            transpose_8x8(r);
            for (int j = 0; j < 8; ++j) _mm256_storeu_ps(panel + (i + j) * PANEL + half * 8, r[j]);
        }
    }
#endif
    for (; i < h; ++i)
        for (int j = 0; j < PANEL; ++j) panel[i * PANEL + j] = to_float(rows[j][i]);
}

// Two neighbouring rows of values become one pair of every panel [keys, 16]; `stride` elements from panel to panel.
inline void values_to_panels(const bf16* first, const bf16* second, int64_t h, bf16* out, int64_t stride) {
    for (int64_t column = 0; column < h; column += PANEL, out += stride) {
        auto* pairs = reinterpret_cast<uint32_t*>(out);
        const int64_t count = h - column < PANEL ? h - column : PANEL;
#if defined(__AVX2__)
        if (count == PANEL) {
            __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + column));
            __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second + column));
            __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs), _mm256_permute2x128_si256(low, high, 0x20));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + 8), _mm256_permute2x128_si256(low, high, 0x31));
            continue;
        }
#endif
        for (int v = 0; v < NV && count == PANEL; ++v) {
            vh x, y;
            std::memcpy(&x, first + column + v * W, sizeof x);
            std::memcpy(&y, second + column + v * W, sizeof y);
            vu joined = __builtin_convertvector(x, vu) | (__builtin_convertvector(y, vu) << 16);
            std::memcpy(pairs + v * W, &joined, sizeof joined);
        }
        if (count < PANEL) {
            for (int i = 0; i < PANEL; ++i)
                pairs[i] = i < count ? static_cast<uint32_t>(first[column + i].bits) |
                                           static_cast<uint32_t>(second[column + i].bits) << 16
                                     : 0;
        }
    }
}
template <class T>
void values_to_panels(const T* first, const T* second, int64_t h, float* out, int64_t stride) {
    for (int64_t column = 0; column < h; column += PANEL, out += stride) {
        const int64_t count = h - column < PANEL ? h - column : PANEL;
        for (int row = 0; row < 2; ++row) {
            const T* source = (row ? second : first) + column;
            float* to = out + row * PANEL;
            if (count == PANEL)
                for (int v = 0; v < NV; ++v) store(to + v * W, load(source + v * W));
            else
                for (int i = 0; i < PANEL; ++i) to[i] = i < count ? to_float(source[i]) : 0.f;
        }
    }
}

// --- one block of queries -----------------------------------------------------------------------------------------

// Softmax state of a block's rows: largest score, sum, and the weighted values [rows, stride].
struct Softmax {
    float* largest;
    float* total;
    float* values;
};

QUIRE_INLINE float exponential_of(float x) { return exponential(set1(x))[0]; }

template <class T>
class BlockAttention {
   public:
    using P = typename PanelOf<T>::type;
    using AType = typename StepOf<P>::type::AType;
    static constexpr bool pairs = converts_a<P>();

    BlockAttention(const AttentionArguments& args, Team& team)
        : args_(args), h_(args.head_dim), v_(args.value_dim), group_(args.num_heads / args.num_kv_heads) {
        // The more rows, the rarer keys and values are brought into panels; but every thread wants several blocks.
        int64_t block_rows = MOST_BLOCK_ROWS;
        while (block_rows > 32 && args.shape[0] * args.num_heads < 4 * team.size * block_rows) block_rows /= 2;
        tokens_ = group_ >= block_rows ? 1 : block_rows / group_;
        if (tokens_ > args.shape[2]) tokens_ = args.shape[2] > 0 ? args.shape[2] : 1;
        stride_ = (v_ + PANEL - 1) / PANEL * PANEL;
        const int64_t rows = tokens_ * group_, padded = (h_ + 1) / 2 * 2;
        const int64_t values_size = stride_ / PANEL * VALUES_STRIDE;
        // The last term is what rounding up the parts may add.
        const size_t floats = rows * padded + padded + rows * KEY_TILE * 2 + KEY_TILE * padded + values_size + padded +
                              2 * rows * (stride_ + 2) + 16 * 16;
        float* memory = team.own<float>(floats * sizeof(float));
        auto carve = [&](int64_t count) {
            float* part = memory;
            memory += (count + 15) / 16 * 16;
            return part;
        };
        queries_ = reinterpret_cast<AType*>(carve(rows * padded));
        scaled_ = carve(padded);
        scores_ = carve(rows * KEY_TILE);
        weights_ = reinterpret_cast<AType*>(carve(rows * KEY_TILE));
        keys_ = reinterpret_cast<P*>(carve(KEY_TILE * padded));
        values_ = reinterpret_cast<P*>(carve(values_size));
        zeros_ = reinterpret_cast<T*>(carve(padded));
        std::memset(static_cast<void*>(zeros_), 0, padded * sizeof(float));
        own_ = Softmax{carve(rows), carve(rows), carve(rows * stride_)};
        merged_ = Softmax{carve(rows), carve(rows), carve(rows * stride_)};
        query_stride_ = pairs ? padded / 2 : padded;
    }

    int64_t tokens() const { return tokens_; }
    int64_t state_floats() const { return tokens_ * group_ * (stride_ + 2); }
    Softmax state_at(float* memory) const {
        int64_t rows = tokens_ * group_;
        return Softmax{memory, memory + rows, memory + 2 * rows};
    }
    const Softmax& merged() const { return merged_; }

    // Take up the block of request `b` that begins at its query token `first`, for one key head.
    void begin(int64_t b, int64_t first, int64_t kv_head) {
        const int64_t start = args_.query_start[b], count = args_.query_start[b + 1] - start;
        kv_head_ = kv_head;
        table_ = args_.block_table + static_cast<int64_t>(args_.table_rows[b]) * args_.block_table_stride;
        first_token_ = start + first;
        rows_ = (count - first < tokens_ ? count - first : tokens_) * group_;
        position_ = args_.seq_lens[b] - count + first;
        length_ = args_.seq_lens[b];
        low_ = first_visible(position_);
        high_ = end_visible(position_ + rows_ / group_ - 1);
        if (args_.seen_end)
            for (int64_t t = 0; t < rows_ / group_; ++t) high_ = std::max(high_, end_visible(position_ + t));
    }
    int64_t first_split() const { return low_ / KEY_SPLIT; }
    int64_t last_split() const { return (high_ - 1) / KEY_SPLIT; }

    void load_queries() {
        for (int64_t r = 0; r < rows_; ++r) {
            const float* x =
                args_.qkv + (first_token_ + r / group_) * args_.qkv_stride + (kv_head_ * group_ + r % group_) * h_;
            AType* row = queries_ + r * query_stride_;
            float* target = pairs ? scaled_ : reinterpret_cast<float*>(row);
            over_row(0, h_, [&](int64_t i, int n) { put(target + i, take(x + i, n) * args_.scale, n); });
            if constexpr (pairs) to_pairs(scaled_, h_, row);
        }
    }

    // The part of the keys in one split, from nothing, into `state`.
    void run_split(int64_t split, const Softmax& state) {
        for (int64_t r = 0; r < rows_; ++r) state.largest[r] = -INFINITY, state.total[r] = 0.f;
        std::memset(state.values, 0, rows_ * stride_ * sizeof(float));
        int64_t begin = split * KEY_SPLIT, end = begin + KEY_SPLIT;
        if (low_ > begin) begin = low_;
        if (high_ < end) end = high_;
        for (int64_t base = begin / KEY_TILE * KEY_TILE; base < end; base += KEY_TILE)
            run_tile(base, base > begin ? base : begin, base + KEY_TILE < end ? base + KEY_TILE : end, state);
    }

    void merge(const Softmax& part, bool first) {
        if (first) {
            std::memcpy(merged_.largest, part.largest, rows_ * sizeof(float));
            std::memcpy(merged_.total, part.total, rows_ * sizeof(float));
            std::memcpy(merged_.values, part.values, rows_ * stride_ * sizeof(float));
            return;
        }
        for (int64_t r = 0; r < rows_; ++r) {
            float top = merged_.largest[r] > part.largest[r] ? merged_.largest[r] : part.largest[r];
            if (top == -INFINITY) continue;
            float old_share = exponential_of(merged_.largest[r] - top), new_share = exponential_of(part.largest[r] - top);
            merged_.largest[r] = top;
            merged_.total[r] = merged_.total[r] * old_share + part.total[r] * new_share;
            float* values = merged_.values + r * stride_;
            const float* others = part.values + r * stride_;
            for (int64_t i = 0; i < stride_; i += W)
                store(values + i, load(values + i) * old_share + load(others + i) * new_share);
        }
    }

    void run_all_splits() {
        load_queries();
        if (first_split() == last_split()) {
            run_split(first_split(), merged_);
        } else {
            for (int64_t split = first_split(); split <= last_split(); ++split) {
                run_split(split, own_);
                merge(own_, split == first_split());
            }
        }
        finish();
    }

    void finish() {
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t head = kv_head_ * group_ + r % group_;
            float total = merged_.total[r], scale = 1.f, top = merged_.largest[r];
            if (args_.sinks) {
                float sink = args_.sinks[head];
                top = top > sink ? top : sink;
                scale = exponential_of(merged_.largest[r] - top);
                total = total * scale + exponential_of(sink - top);
            }
            if (args_.lse)
                args_.lse[(first_token_ + r / group_) * args_.num_heads + head] = total > 0 ? top + std::log(total) : -INFINITY;
            scale = total > 0 ? scale / total : 0.f;
            float* out = args_.out + ((first_token_ + r / group_) * args_.num_heads + head) * v_;
            const float* values = merged_.values + r * stride_;
            over_row(0, v_, [&](int64_t i, int n) { put(out + i, load(values + i) * scale, n); });
        }
    }

   private:
    // The keys that the query at `position` sees: from the first to before the end.
    int64_t first_visible(int64_t position) const {
        int64_t first = 0;
        if (args_.window > 0) first = position - (args_.causal ? args_.window - 1 : args_.window / 2);
        if (args_.chunk > 0) first = std::max(first, position - position % args_.chunk);
        return std::max<int64_t>(first, 0);
    }
    int64_t end_visible(int64_t position) const {
        if (args_.seen_end) return std::max<int64_t>(position + 1, args_.seen_end[first_token_ + position - position_]);
        if (args_.causal) return position + 1;
        return args_.window > 0 ? std::min(position + args_.window / 2 + 1, length_) : length_;
    }

    // Rows of keys and values of the sixteen positions from `first`; those outside [begin, end) are rows of zeros.
    void find_rows(int64_t first, int64_t begin, int64_t end, const T* (&keys)[PANEL], const T* (&values)[PANEL]) const {
        const int64_t size = args_.block_size;
        const T* cache = static_cast<const T*>(args_.cache) + kv_head_ * size * h_;
        int64_t column = first / size, offset = first % size;
        const T* page = nullptr;
        for (int64_t i = 0; i < PANEL; ++i, ++offset) {
            if (offset == size) ++column, offset = 0, page = nullptr;
            if (first + i < begin || first + i >= end) {
                keys[i] = values[i] = zeros_;
                continue;
            }
            if (!page) page = cache + table_[column] * args_.page_stride;
            keys[i] = page + offset * h_;
            values[i] = keys[i] + args_.plane_stride;
        }
    }

    void prefetch_rows(int64_t first) const {
        const int64_t size = args_.block_size, offset = first % size;
        if (first >= high_ || offset + PANEL > size) return;
        const T* keys =
            static_cast<const T*>(args_.cache) + table_[first / size] * args_.page_stride + (kv_head_ * size + offset) * h_;
        const char* lines = reinterpret_cast<const char*>(keys);
        const char* others = reinterpret_cast<const char*>(keys + args_.plane_stride);
        for (int64_t byte = 0; byte < PANEL * h_ * static_cast<int64_t>(sizeof(T)); byte += 64) {
            __builtin_prefetch(lines + byte);
            __builtin_prefetch(others + byte);
        }
    }

    // Keys begin to end - 1 of the tile at `base`; the others of the tile are invisible to the whole block.
    void run_tile(int64_t base, int64_t begin, int64_t end, const Softmax& state) {
        const int64_t from = (begin - base) / PANEL * PANEL, to = (end - base + PANEL - 1) / PANEL * PANEL;
        const int64_t padded = (h_ + 1) / 2 * 2;
        for (int64_t j = from; j < to; j += PANEL) {
            const T *keys[PANEL], *values[PANEL];
            find_rows(base + j, begin, end, keys, values);
            prefetch_rows(base + j + 2 * PANEL);
            keys_to_panel(keys, h_, keys_ + j * padded);
            for (int64_t i = 0; i < PANEL; i += 2)
                values_to_panels(values[i], values[i + 1], v_, values_ + (j + i) * PANEL, VALUES_STRIDE);
        }
        MicroCall call{};
        call.a = queries_;
        call.lda = query_stride_;
        call.b = keys_ + from * padded;
        call.panel_stride = PANEL * padded;
        call.k = h_;
        call.c = scores_ + from;
        call.ldc = KEY_TILE;
        multiply<P>(call, rows_, (to - from) / PANEL);
        for (int64_t r = 0; r < rows_; ++r) softmax_row(r, base, from, to, state);
        call.a = weights_of(0) + (pairs ? from / 2 : from);
        call.lda = pairs ? KEY_TILE / 2 : KEY_TILE;
        call.b = values_ + from * PANEL;
        call.panel_stride = VALUES_STRIDE;
        call.k = to - from;
        call.c = state.values;
        call.ldc = stride_;
        call.accumulate = true;
        multiply<P>(call, rows_, stride_ / PANEL);
    }

    // Where the product with the values reads a row's weights: bfloat16 pairs, or the scores themselves.
    AType* weights_of(int64_t r) {
        if constexpr (pairs)
            return weights_ + r * (KEY_TILE / 2);
        else
            return scores_ + r * KEY_TILE;
    }

    void softmax_row(int64_t r, int64_t base, int64_t from, int64_t to, const Softmax& state) {
        const int64_t position = position_ + r / group_, head = kv_head_ * group_ + r % group_;
        float* scores = scores_ + r * KEY_TILE;
        // Visible keys of this row: [low, high) within the tile.
        const int64_t high = end_visible(position) - base;
        const int64_t low = first_visible(position) - base;
        const bool masked = high < to || low > from;
        const int64_t ahead = args_.seen_end ? high + base - position - 1 : 0;
        const bool shaped = args_.soft_cap > 0 || args_.alibi_slopes;
        vf top = set1(-INFINITY);
        vi lane;
        for (int i = 0; i < W; ++i) lane[i] = i;
        for (int64_t j = from; j < to; j += W) {
            vf s = load(scores + j);
            if (shaped) s = shape_scores(s, lane, base + j - position, head);
            if (masked) {
                vi column = lane + static_cast<int32_t>(j);
                vi visible = (column < static_cast<int32_t>(high)) & (column >= static_cast<int32_t>(low));
                s = visible ? s : set1(-INFINITY);
            }
            if (ahead > 0 && base + j + W > position + 1) hide_others(s, base + j, position, high + base);
            if (shaped || masked || ahead > 0) store(scores + j, s);
            top = max(s, top);
        }
        const float old = state.largest[r], now = largest(top), new_largest = now > old ? now : old;
        const float safe = new_largest == -INFINITY ? 0.f : new_largest;
        vf sums = zero();
        for (int64_t j = from; j < to; j += W) {
            vf weight = exponential(load(scores + j) - safe);
            sums = sums + weight;
            store(scores + j, weight);
        }
        if constexpr (pairs) to_pairs(scores + from, to - from, weights_of(r) + from / 2);
        const float keep = old == new_largest ? 1.f : exponential_of(old - safe);
        state.total[r] = state.total[r] * keep + sum(sums);
        state.largest[r] = new_largest;
        if (keep != 1.f) {
            float* values = state.values + r * stride_;
            for (int64_t i = 0; i < stride_; i += W) store(values + i, load(values + i) * keep);
        }
    }

    // Of the keys from `first` on that stand behind the query, those that do not see as far as it does.
    void hide_others(vf& s, int64_t first, int64_t position, int64_t end) const {
        for (int i = 0; i < W; ++i) {
            const int64_t key = first + i;
            if (key > position && key < end && args_.seen_end[first_token_ + key - position_] != end) s[i] = -INFINITY;
        }
    }

    // Soft cap and ALiBi; `distance` is that of the first lane's key to the query.
    vf shape_scores(vf s, vi lane, int64_t distance, int64_t head) const {
        if (args_.soft_cap > 0) s = args_.soft_cap * hyperbolic_tangent(s / args_.soft_cap);
        if (args_.alibi_slopes) s = s + args_.alibi_slopes[head] * convert_int(lane + static_cast<int32_t>(distance));
        return s;
    }

    const AttentionArguments& args_;
    int64_t h_, v_, group_, tokens_, stride_, query_stride_;
    AType* queries_;
    float* scaled_;
    float* scores_;
    AType* weights_;
    P* keys_;
    P* values_;
    T* zeros_;
    Softmax own_, merged_;
    const int32_t* table_;
    int64_t kv_head_, first_token_, rows_, position_, length_, low_, high_;
};

// --- sharing the work out -----------------------------------------------------------------------------------------

// Finds (request, block, key head) of ever larger item numbers; late blocks first, since they see the most keys.
class Items {
   public:
    Items(const AttentionArguments& args, int64_t tokens_a_block) : args_(args), tokens_(tokens_a_block) {
        for (int64_t b = 0; b < args.shape[1]; ++b) {
            total_ += blocks_of(b) * args.num_kv_heads;
            if (blocks_of(b) > 0 && args.seq_lens[b] > longest_) longest_ = args.seq_lens[b];
        }
    }
    int64_t total() const { return total_; }
    int64_t longest() const { return longest_; }
    template <class Block>
    void begin(int64_t item, Block& block) {
        while (item >= before_ + blocks_of(request_) * args_.num_kv_heads)
            before_ += blocks_of(request_++) * args_.num_kv_heads;
        int64_t within = item - before_, from_last = within / args_.num_kv_heads;
        block.begin(request_, (blocks_of(request_) - 1 - from_last) * tokens_, within % args_.num_kv_heads);
    }

   private:
    int64_t blocks_of(int64_t b) const {
        int64_t count = args_.query_start[b + 1] - args_.query_start[b];
        return count > 0 ? (count + tokens_ - 1) / tokens_ : 0;
    }
    const AttentionArguments& args_;
    int64_t tokens_, total_ = 0, longest_ = 0, request_ = 0, before_ = 0;
};

template <class T>
void attention_typed(const AttentionArguments& args, Team& team) {
    BlockAttention<T> block(args, team);
    Items items(args, block.tokens());
    const int64_t splits = (items.longest() + KEY_SPLIT - 1) / KEY_SPLIT;
    const size_t bytes = items.total() * splits * block.state_floats() * sizeof(float);
    if (items.total() >= 2 * team.size || team.size == 1 || splits < 2 || bytes > MOST_SPLIT_BYTES) {
        for (int64_t item; (item = team.next()) < items.total();) {
            items.begin(item, block);
            block.run_all_splits();
        }
        return;
    }
    // Fewer blocks than threads can share: the splits of the keys are shared as well.
    float* parts = team.common<float>(bytes);
    auto part = [&](int64_t item, int64_t split) {
        return block.state_at(parts + (item * splits + split) * block.state_floats());
    };
    Items first_pass = items;
    for (int64_t task; (task = team.next()) < items.total() * splits;) {
        first_pass.begin(task / splits, block);
        int64_t split = task % splits;
        if (split < block.first_split() || split > block.last_split()) continue;
        block.load_queries();
        block.run_split(split, part(task / splits, split));
    }
    team.barrier();
    for (int64_t item; (item = team.next()) < items.total();) {
        items.begin(item, block);
        for (int64_t split = block.first_split(); split <= block.last_split(); ++split)
            block.merge(part(item, split), split == block.first_split());
        block.finish();
    }
}

inline void paged_attention(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const AttentionArguments*>(arguments);
    if (args.dtype == kBFloat16)
        attention_typed<bf16>(args, team);
    else if (args.dtype == kFloat16)
        attention_typed<f16>(args, team);
    else
        attention_typed<float>(args, team);
}

}  // namespace QUIRE_ISA
}  // namespace quire
