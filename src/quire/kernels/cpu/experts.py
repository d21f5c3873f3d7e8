"""Mixtures of experts on the native library: tensors become pointers, and experts' matrices panels.

The argument structures are field by field those of `csrc/moe.h`.
Legend: T tokens, E experts, K experts a token, D hidden, I intermediate.
"""

import dataclasses

import torch

from quire.kernels.cpu.arguments import structure
from quire.kernels.cpu.binding import address, cpu_kernel, float_address, pack_panels, run
from quire.kernels.cpu.library import DTYPES
from quire.kernels.cpu.norm import NUMBERS
from quire.kernels.types import ExpertScratch, ExpertWeights, LinearWeight, Routing

SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}


_Route = structure(
    "_Route",
    pointers="logits bias ids weights",
    longs="experts top_k groups top_groups",
    ints="scoring renormalize",
    floats="scale jitter",
)
_Experts = structure(
    "_Experts",
    pointers="x ids weights out gate_up down gate_up_bias down_bias",
    longs="d intermediate experts first top_k",
    ints="dtype kind gated clamped scales_input",
    floats="alpha limit",
)


@dataclasses.dataclass(frozen=True)
class PackedExperts(ExpertWeights):
    """Experts in panels; the plain matrices keep their shapes and types only.

    Attributes:
        packed_gate_up: of each expert the gate's panels (if it has a gate), then up's.
        packed_down: of each expert its panels.
    """

    packed_gate_up: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    packed_down: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))


@cpu_kernel("moe_route")
def moe_route(
    logits_TE: torch.Tensor,
    routing: Routing,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    bias_E: torch.Tensor | None = None,
) -> None:
    call = _Route(
        float_address(logits_TE, "logits"),
        float_address(bias_E, "bias"),
        address(ids_TK, torch.int32, "ids"),
        float_address(weights_TK, "weights"),
        routing.num_experts,
        routing.top_k,
        routing.groups,
        routing.top_groups,
        SCORINGS[routing.scoring],
        int(routing.renormalize),
        routing.scale,
        routing.jitter,
    )
    run("moe_route", call, logits_TE.shape[0], logits_TE, bias_E, ids_TK, weights_TK)


@cpu_kernel("pack_experts")
def pack_experts(experts: ExpertWeights) -> ExpertWeights:
    values = {field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}
    for name in ("gate_up_E2ID", "down_EDI"):
        values[name] = values[name].to("meta")
    return PackedExperts(
        **values,
        packed_gate_up=pack_panels(experts.gate_up_E2ID.unflatten(1, (-1, experts.intermediate)).flatten(0, 1)),
        packed_down=pack_panels(experts.down_EDI),
    )


@cpu_kernel("expert_matrices")
def expert_matrices(experts: ExpertWeights, number: int) -> tuple[list[LinearWeight], LinearWeight]:
    if not isinstance(experts, PackedExperts):
        raise ValueError("these experts were not packed by the CPU kernels")
    dtype, hidden, inside = experts.down_EDI.dtype, experts.down_EDI.shape[1], experts.intermediate
    columns = experts.gate_up_E2ID.shape[2]
    panels = experts.packed_gate_up.view(experts.count, 2 if experts.is_gated else 1, -1)[number]
    wide = [LinearWeight(inside, columns, dtype, None, panel) for panel in panels]
    return wide, LinearWeight(hidden, inside, dtype, None, experts.packed_down.view(experts.count, -1)[number])


@cpu_kernel("moe_experts")
def moe_experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    kind: str,
    num_tokens: torch.Tensor,
    out_TD: torch.Tensor,
    scratch: ExpertScratch,
) -> None:
    if not isinstance(experts, PackedExperts):
        raise ValueError("these experts were not packed by the CPU kernels")
    clamp = experts.clamp
    gate_up, down = experts.packed_gate_up, experts.packed_down
    call = _Experts(
        float_address(x_TD, "x"),
        address(ids_TK, torch.int32, "ids"),
        float_address(weights_TK, "weights"),
        float_address(out_TD, "out"),
        gate_up.data_ptr(),
        down.data_ptr(),
        float_address(experts.gate_up_bias_E2I, "gate_up_bias"),
        float_address(experts.down_bias_ED, "down_bias"),
        x_TD.shape[1],
        experts.intermediate,
        experts.count,
        experts.first,
        ids_TK.shape[1],
        DTYPES[gate_up.dtype],
        NUMBERS[kind],
        int(experts.is_gated),
        0 if clamp is None else 1 if clamp.offset else 2,
        int(experts.scales_input),
        0.0 if clamp is None else clamp.alpha,
        0.0 if clamp is None else clamp.limit,
    )
    tensors = (x_TD, ids_TK, weights_TK, out_TD, gate_up, down, experts.gate_up_bias_E2I, experts.down_bias_ED)
    run("moe_experts", call, x_TD.shape[0], *tensors)
