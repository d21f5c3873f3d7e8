// All operations for one instruction set. Compiled once for each, with QUIRE_ISA naming it and the flags that it needs.
#include "adapters.h"
#include "arguments.h"
#include "attention.h"
#include "elementwise.h"
#include "latent.h"
#include "linear.h"
#include "packed_linear.h"
#include "moe.h"
#include "recurrent.h"
#include "recurrent_scan.h"
#include "rope.h"
#include "sampling.h"
#include "team.h"

#define QUIRE_JOIN_(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN_(a, b)
#define QUIRE_TEXT_(a) #a
#define QUIRE_TEXT(a) QUIRE_TEXT_(a)

namespace quire {
namespace QUIRE_ISA {

// Reads memory and adds it up: what the machine can read at most, measured beside the kernels.
inline void read(const void* arguments, int64_t, Team& team) {
    const auto& args = *static_cast<const ReadArguments*>(arguments);
    int64_t begin, end;
    // Four streams a thread, as the kernels have: one alone does not keep enough lines in flight.
    constexpr int streams = 4, vectors = 64 / (W * 4);
    team.share(args.bytes / (64 * streams), begin, end);
    const char* p = static_cast<const char*>(args.source) + begin * 64 * streams;
    const int64_t lines = end - begin;
    vi sums[streams * vectors] = {};
    for (int64_t i = 0; i < lines; ++i) {
        for (int stream = 0; stream < streams; ++stream) {
            const char* line = p + (stream * lines + i) * 64;
            __builtin_prefetch(line + 1024);
            for (int v = 0; v < vectors; ++v) {
                vi x;
                std::memcpy(&x, line + v * sizeof x, sizeof x);
                sums[stream * vectors + v] = sums[stream * vectors + v] + x;
            }
        }
    }
    vi total{};
    for (vi part : sums) total = total + part;
    args.sink[team.index] = total[0];
}

inline void nothing(const void*, int64_t, Team&) {}

static const NamedOperation operations[] = {
    {"pack", pack},
    {"linear", linear},
    {"embedding", embedding},
    {"pack_codes", pack_codes},
    {"packed_linear", packed_linear},
    {"packed_linear_exact", packed_linear_exact},
    {"adapter_shrink", adapter_shrink},
    {"adapter_lookup", adapter_lookup},
    {"adapter_expand", adapter_expand},
    {"norm", norm},
    {"add", add},
    {"activation", activation},
    {"xielu", xielu},
    {"clip", clip},
    {"scale_rows", scale_rows},
    {"gather_rows", gather_rows},
    {"scale_and_cap", scale_and_cap},
    {"argmax", argmax},
    {"thresholds", thresholds},
    {"keep_allowed", keep_allowed},
    {"rope_and_cache", rope_and_cache},
    {"paged_attention", paged_attention},
    {"head_linear", head_linear},
    {"latent_and_cache", latent_and_cache},
    {"causal_conv", causal_conv},
    {"selective_scan", selective_scan},
    {"ssd_scan", ssd_scan},
    {"gated_delta_rule", gated_delta_rule},
    {"rg_lru", rg_lru},
    {"wkv", wkv},
    {"gated_norm", gated_norm},
    {"gate", gate},
    {"scale_columns", scale_columns},
    {"moe_route", moe_route},
    {"moe_experts", moe_experts},
    {"sigmoid_gate", sigmoid_gate},
    {"read", read},
    {"nothing", nothing},
    {nullptr, nullptr},
};

}  // namespace QUIRE_ISA

extern const KernelSet QUIRE_JOIN(kernels_, QUIRE_ISA);
const KernelSet QUIRE_JOIN(kernels_, QUIRE_ISA){QUIRE_TEXT(QUIRE_ISA), QUIRE_ISA::operations};

}  // namespace quire
