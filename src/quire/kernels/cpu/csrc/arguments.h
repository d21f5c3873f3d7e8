// The argument structures of every operation: plain pointers and numbers, mirrored by `library.py`.
// Pointers are to contiguous rows unless a stride is named. Activations are float32; `dtype` is that of weights or cache.
#pragma once

#include <cstdint>

namespace quire {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Activation : int32_t {
    kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kQuickGelu, kGelu10, kRelu6, kLeakyRelu, kLogistic, kTanh, kMish, kHardSwish, kLinear,
    kLaplace, kSqrtSoftplus
};

struct PackArguments {  // rows: panels of 16 output features
    const void* source;
    void* packed;
    int64_t n, k, source_stride;  // stride in elements
    int32_t dtype;
};

struct LinearArguments {  // rows: tokens
    const float* x;
    const void* packed;
    const float* bias;
    float* out;
    int64_t n, k;
    int32_t dtype;
};

struct EmbeddingArguments {  // rows: tokens
    const int32_t* ids;
    const void* packed;
    float* out;
    int64_t n, k;
    float scale;
    int32_t accumulate, dtype;
};

struct NormArguments {  // rows: tokens; in each `groups` norms of d values, side by side, with weights of their own
    const float* x;
    const float* weight;
    const float* bias;
    float* out;
    float* residual;
    int64_t d, groups, stride;  // stride in elements: of x and out where there are several groups
    float eps;
    int32_t subtract_mean;
};

struct AddArguments {  // rows: tokens
    const float* x;
    float* out;
    int64_t d;
    float scale;
};

struct ActivationArguments {  // rows: tokens; gated: x is [T, 2d], else x is out
    const float* x;
    float* out;
    int64_t d;
    int32_t kind, gated;
};

struct XieluArguments {  // rows: tokens
    float* x;
    const float* alphas;
    int64_t d;
};

struct ClipArguments {  // rows: tokens; stride in elements
    float* x;
    int64_t d, stride;
    float limit;
};

struct ScaleRowsArguments {  // rows: tokens; stride in elements
    float* x;
    const float* table;
    const int32_t* index;
    int64_t d, stride;
};

struct GatherArguments {  // rows: gathered rows
    const float* x;
    const int32_t* index;
    float* out;
    int64_t d;
};

struct ScaleAndCapArguments {  // rows: logits rows
    float* x;
    int64_t d;
    float scale, soft_cap;
};

struct ArgmaxArguments {  // rows: logits rows; seed == nullptr: plain argmax; slots == nullptr, or < 0: everything is allowed
    float* logits;
    const float* inverse_temperature;
    const int64_t* seed;
    const int64_t* position;
    const int32_t* slots;
    const int32_t* allowed;
    const float* threshold;  // nullptr: nothing is hidden
    int32_t* out;
    int64_t v, words;
};

struct ThresholdsArguments {  // rows: logits rows; top_k of 0, top_p of 1 and min_p of 0 are off
    const float* logits;
    const float* inverse_temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    float* out;
    int64_t v;
};

struct KeepAllowedArguments {  // rows: logits rows; slots[row] < 0: all of them
    float* logits;
    const int32_t* slots;
    const int32_t* allowed;
    int64_t v, words;
};

struct RopeArguments {  // rows: tokens
    float* qkv;
    void* cache;
    const int64_t* slot_mapping;
    const int32_t* positions;
    const float* cos_sin;
    const float* q_norm;
    const float* k_norm;
    int64_t plane_stride, page_stride, qkv_stride, block_size;  // strides in elements
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
    int32_t interleaved, dtype;
    float eps;
};

struct AttentionArguments {  // rows: tokens (unused: the batch is read from the metadata)
    const float* qkv;
    const void* cache;
    float* out;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* table_rows;
    const int32_t* block_table;
    const int64_t* shape;  // num_tokens, num_requests, max_query_len, max_seq_len
    const float* sinks;
    const float* alibi_slopes;
    const int32_t* seen_end;  // a token also sees the keys before this position with the same one; null: no token does
    float* lse;  // [tokens, heads]: the logarithm of each softmax's denominator; null: not wanted
    int64_t plane_stride, page_stride, qkv_stride, block_size, block_table_stride;  // strides in elements
    int32_t num_heads, num_kv_heads, head_dim, value_dim, window;
    int32_t causal, chunk, dtype;
    float scale, soft_cap;
};

struct ReadArguments {  // rows: unused; sums 64-bit words, to measure the machine
    const void* source;
    int64_t bytes;
    int64_t* sink;
};

}  // namespace quire
