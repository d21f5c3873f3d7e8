// Packed weights: codes of 4 or 8 bits, a scale a row and group of columns; their layout, and how codes become numbers.
//
// Codes lie in panels of 16 rows, each a list of lines of 64 bytes: 16 words of 32 bits, one a row. A byte's word holds four
// columns, so that one instruction can multiply four columns of 16 rows; of 4-bit codes, the low halves of a word's bytes are
// four columns and the high halves the next four. Scales and zeros are [panels][groups][16]. Missing rows and columns are
// codes 0, whose rows are not stored and whose columns meet zeros.
#pragma once

#include "micro.h"
#include "team.h"

namespace quire {

struct PackCodesArguments {  // rows: panels of 16 output features
    const void* codes;
    void* packed;
    int64_t n, k, stride, lines;  // stride in bytes; lines of a packed panel
    int32_t kind;
};

struct PackedLinearArguments {  // rows: tokens
    const float* x;
    const void* codes;
    const void* scale;  // float16 or float32 [panels][groups][16]
    const void* zero;   // the same, in units of codes; or null
    const int32_t* perm;       // [k] or null
    const float* table;        // [16] or null
    const uint8_t* digits;     // [2][16]
    const float* input_scale;  // or null: by each block's largest magnitude
    const float* bias;
    float* out;
    int64_t n, k, groups, block;  // block: columns of x that share a scale
    float unit, scale_unit;       // what products of codes and scales, and scales alone, are multiplied by
    int32_t kind, half_scale, half_zero, code_zero;
};

namespace QUIRE_ISA {

constexpr int64_t LINE = 64;

// How codes become the numbers that are multiplied: as they are; looked up in one table of seven-bit digits, or in two (a value
// is 128 * first + second); or whole bytes. Tables begin at their smallest value, which `code_zero` subtracts again.
enum PackedKind : int32_t { kNibbles = 0, kOneDigit = 1, kTwoDigits = 2, kBytes = 3 };

constexpr int64_t columns_of_line(int kind) { return kind == kBytes ? 4 : 8; }

// --- bytes in the lanes of words ----------------------------------------------------------------------------------

// The instruction that multiplies unsigned with signed bytes takes a weight's byte as 128 more than it is.
#if defined(__AVX512VNNI__)
constexpr bool UNSIGNED_BYTES = true;
#else
constexpr bool UNSIGNED_BYTES = false;
#endif

QUIRE_INLINE vu load_words(const uint8_t* p) {
    vu words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
QUIRE_INLINE vf load_scale(const void* p, int64_t place, bool is_half) {
    return is_half ? load(static_cast<const f16*>(p) + place) : load(static_cast<const float*>(p) + place);
}
QUIRE_INLINE vi set1_int(int32_t x) { return x - vi{}; }

// Sixteen bytes, to be looked up by numbers below 16 in every byte.
struct ByteTable {
    vu bytes;  // in each 128 bits again
    explicit ByteTable(const uint8_t* p) {
        for (int part = 0; part < W / 4; ++part) std::memcpy(reinterpret_cast<char*>(&bytes) + 16 * part, p, 16);
    }
    QUIRE_INLINE vu look_up(vu index) const {
#if defined(__AVX512BW__)
        return (vu)_mm512_shuffle_epi8((__m512i)bytes, (__m512i)index);
#elif defined(__AVX2__)
        return (vu)_mm256_shuffle_epi8((__m256i)bytes, (__m256i)index);
#elif defined(__ARM_NEON)
        return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(bytes), vreinterpretq_u8_u32(index)));
#else
        uint8_t table[W * 4], places[W * 4];
        std::memcpy(table, &bytes, sizeof table);
        std::memcpy(places, &index, sizeof places);
        for (uint8_t& place : places) place = table[place];
        vu found;
        std::memcpy(&found, places, sizeof found);
        return found;
#endif
    }
};

// sums + the products of each word's four bytes. x is signed, at most 127 in magnitude; w is below 128 and not negative, or
// (`whole`) any byte in the form in which they are packed.
template <bool whole>
QUIRE_INLINE vi dot_bytes(vi sums, vu w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    __m512i a = (__m512i)w, b = _mm512_set1_epi32(x);
    if (whole) {  // pairs of products of unsigned with signed bytes may not exceed 16 bits: the sign moves to x
        b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
        a = _mm512_abs_epi8(a);
    }
    return sums + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    __m256i a = (__m256i)w, b = _mm256_set1_epi32(x);
    if (whole) {
        b = _mm256_sign_epi8(b, a);
        a = _mm256_abs_epi8(a);
    }
    return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#else
    for (int byte = 0; byte < 4; ++byte) {
        const int32_t factor = static_cast<int8_t>(static_cast<uint32_t>(x) >> 8 * byte);
        sums = sums + (bit_cast<vi>(w << (24 - 8 * byte)) >> 24) * factor;
    }
    return sums;
#endif
}

// --- packing ------------------------------------------------------------------------------------------------------

inline uint32_t pack_line_word(const uint8_t* row, int64_t column, int64_t k, int kind) {
    uint32_t word = 0;
    if (kind == kBytes) {
        for (int64_t i = 0; i < 4 && column + i < k; ++i)
            word |= static_cast<uint32_t>(row[column + i] ^ (UNSIGNED_BYTES ? 0x80 : 0)) << 8 * i;
        return word;
    }
    for (int64_t i = 0; i < 8 && column + i < k; ++i) {
        const uint32_t code = row[(column + i) / 2] >> 4 * ((column + i) & 1) & 15;
        word |= code << (i < 4 ? 8 * i : 8 * (i - 4) + 4);
    }
    return word;
}

inline void pack_codes(const void* arguments, int64_t rows, Team& team) {
    const auto& args = *static_cast<const PackCodesArguments*>(arguments);
    const int64_t columns = columns_of_line(args.kind), size = args.lines * LINE;
    int64_t begin, end;
    team.share(rows, begin, end);  // as `packed_linear` shares panels out
    for (int64_t panel = begin; panel < end; ++panel) {
        uint8_t* out = static_cast<uint8_t*>(args.packed) + panel * size;
        for (int64_t line = 0; line < args.lines; ++line, out += LINE) {
            uint32_t words[PANEL] = {};
            for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < args.n; ++lane)
                words[lane] = pack_line_word(static_cast<const uint8_t*>(args.codes) + (panel * PANEL + lane) * args.stride,
                                             line * columns, args.k, args.kind);
            std::memcpy(out, words, sizeof words);
        }
    }
}

// --- inputs in int8 -----------------------------------------------------------------------------------------------

// Rows multiplied at once; a rest of them is filled up with rows of zeros.
constexpr int PACKED_ROWS = W == 16 ? 12 : 4;
constexpr int tile_rows(int64_t rows) {
    if (W == 16 && rows > 4) return rows > 8 ? 12 : rows > 6 ? 8 : 6;
    return static_cast<int>(rows < 4 ? rows : 4);
}

// Rows of x as the products want them, in tiles. A tile holds for each four columns a word of its every row; then, for each block
// of columns, each row's scale, the sum of its numbers with the sign changed, and what sums of products begin with (the code's zero times that sum).
struct RoundedRows {
    int32_t* data;
    int64_t rows, words, blocks;

    int64_t bytes(int64_t count) const {
        const int64_t whole = count / PACKED_ROWS * PACKED_ROWS;
        return (whole + (count > whole ? tile_rows(count - whole) : 0)) * (words + 3 * blocks) * sizeof(int32_t);
    }
    int32_t* tile(int64_t first) const { return data + first * (words + 3 * blocks); }
    int rows_of_tile(int64_t first) const { return rows - first >= PACKED_ROWS ? PACKED_ROWS : tile_rows(rows - first); }
};

// NaN if any value is NaN or infinite: a scale that says so, since whole numbers cannot.
inline float largest_magnitude(const float* x, int64_t count) {
    vf most = zero(), mark = zero();
    for (int64_t i = 0; i < count; i += W) {
        const vf v = count - i >= W ? load(x + i) : load_some(x + i, static_cast<int>(count - i));
        most = max(most, max(v, -v));
        mark = mark + (v - v);
    }
    return largest(most) + sum(mark);
}

// One block of a row: `count` values, of which those from `valid` on are zero, as bytes, four of them to every `step`-th word.
// Returns their sum.
inline int32_t round_block(const float* x, int64_t count, int64_t valid, float scale, bool divide, int32_t* out, int64_t step) {
    const float inverse = 1.f / scale, magic = 12582912.f;  // adding it rounds to a whole number, to even at the half
    vi sums{};
    for (int64_t i = 0; i < count; i += W) {
        const int64_t left = valid - i;
        vf v = left >= W ? load(x + i) : left > 0 ? load_some(x + i, static_cast<int>(left)) : zero();
        v = divide ? v / scale : v * inverse;
        const vi whole = bit_cast<vi>(min(max(v, set1(-127.f)), set1(127.f)) + magic) - bit_cast<int32_t>(magic);
        sums = sums + whole;
        typedef int8_t vq __attribute__((vector_size(W)));
        const vq narrow = __builtin_convertvector(whole, vq);
        int32_t words[W / 4];
        std::memcpy(words, &narrow, sizeof words);
        for (int64_t j = 0; j < W / 4 && i + 4 * j < count; ++j) out[(i / 4 + j) * step] = words[j];
    }
    int32_t lanes[W], sum = 0;
    std::memcpy(lanes, &sums, sizeof sums);
    for (int32_t lane : lanes) sum += lane;
    return sum;
}

// Row m of x into its tile; a row behind the last is zero. `scratch`: k values, if columns are in another order.
inline void round_row(const PackedLinearArguments& args, const float* x, const RoundedRows& rows, int64_t m, float* scratch) {
    const int64_t first_row = m / PACKED_ROWS * PACKED_ROWS, step = rows.rows_of_tile(first_row);
    int32_t* words = rows.tile(first_row) + m - first_row;
    int32_t* rest = words + rows.words * step;
    if (m >= rows.rows) {
        for (int64_t i = 0; i < rows.words + 3 * rows.blocks; ++i) words[i * step] = 0;
        return;
    }
    if (args.perm) {
        for (int64_t i = 0; i < args.k; ++i) scratch[i] = x[args.perm[i]];
        x = scratch;
    }
    const int32_t code_zero = args.code_zero + (UNSIGNED_BYTES && args.kind == kBytes ? 128 : 0);
    for (int64_t b = 0; b < rows.blocks; ++b) {
        const int64_t first = b * args.block, left = args.k - first, valid = left < args.block ? left : args.block;
        const float most = largest_magnitude(x + first, valid);
        float scale = args.input_scale ? *args.input_scale + (most - most) : most / 127.f;
        scale = scale < 1e-12f ? 1e-12f : scale;  // rows of zeros stay zeros, NaN stays NaN
        const int32_t sum = round_block(x + first, args.block, valid, scale, rows.blocks == 1, words + first / 4 * step, step);
        rest[b * step] = bit_cast<int32_t>(scale * args.unit);
        rest[(rows.blocks + b) * step] = bit_cast<int32_t>(static_cast<float>(-sum));
        rest[(2 * rows.blocks + b) * step] = -code_zero * sum;
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
