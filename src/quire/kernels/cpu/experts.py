"""Mixtures of experts on the native library: tensors become pointers, and experts' matrices panels.

The argument structures are field by field those of `csrc/moe.h`.
Legend: T tokens, E experts, K experts a token, D hidden, I intermediate.
"""

import dataclasses

import torch

from quire.kernels.cpu.binding import Operation, cpu_kernel, pack_panels
from quire.kernels.cpu.library import DTYPES
from quire.kernels.cpu.norm import NUMBERS
from quire.kernels.types import ExpertScratch, ExpertWeights, LinearWeight, Routing

SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}


_ROUTE = Operation(
    "moe_route",
    "logits bias ids:int weights",
    longs="experts top_k groups top_groups",
    ints="scoring renormalize",
    floats="scale jitter",
)
_EXPERTS = Operation(
    "moe_experts",
    "x ids:int weights out gate_up:any down:any gate_up_bias down_bias",
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
    _ROUTE(
        len(logits_TE),
        logits=logits_TE,
        bias=bias_E,
        ids=ids_TK,
        weights=weights_TK,
        experts=routing.num_experts,
        top_k=routing.top_k,
        groups=routing.groups,
        top_groups=routing.top_groups,
        scoring=SCORINGS[routing.scoring],
        renormalize=routing.renormalize,
        scale=routing.scale,
        jitter=routing.jitter,
    )


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
    limits = {} if clamp is None else {"alpha": clamp.alpha, "limit": clamp.limit, "clamped": 1 if clamp.offset else 2}
    _EXPERTS(
        len(x_TD),
        x=x_TD,
        ids=ids_TK,
        weights=weights_TK,
        out=out_TD,
        gate_up=experts.packed_gate_up,
        down=experts.packed_down,
        gate_up_bias=experts.gate_up_bias_E2I,
        down_bias=experts.down_bias_ED,
        d=x_TD.shape[1],
        intermediate=experts.intermediate,
        experts=experts.count,
        first=experts.first,
        top_k=ids_TK.shape[1],
        dtype=DTYPES[experts.packed_gate_up.dtype],
        kind=NUMBERS[kind],
        gated=experts.is_gated,
        scales_input=experts.scales_input,
        **limits,
    )
