"""Mixtures of experts on the native library: tensors become pointers, and experts' matrices panels.

The argument structures are field by field those of `csrc/moe.h`.
Legend: T tokens, E experts, K experts a token, D hidden, I intermediate.
"""

import ctypes
import dataclasses

import torch

from quire.kernels.cpu.arguments import PackArguments
from quire.kernels.cpu.library import DTYPES, library
from quire.kernels.cpu.operations import ACTIVATIONS, PANEL, PRIORITY, rows_address, unavailable
from quire.kernels.experts import ExpertScratch, ExpertWeights, Routing
from quire.kernels.registry import kernel

SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}


def _structure(name: str, **kinds: str) -> type[ctypes.Structure]:
    """Fields by kind: a keyword's value names the fields of that type, in order."""
    types = {"pointers": ctypes.c_void_p, "longs": ctypes.c_int64, "ints": ctypes.c_int32, "floats": ctypes.c_float}
    fields = [(field, types[kind]) for kind, names in kinds.items() for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Route = _structure(
    "_Route", pointers="logits bias ids weights", longs="experts top_k groups top_groups", ints="scoring renormalize",
    floats="scale jitter",
)  # fmt: skip
_Experts = _structure(
    "_Experts", pointers="x ids weights out gate_up down gate_up_bias down_bias",
    longs="d intermediate experts first top_k", ints="dtype kind gated clamped scales_input", floats="alpha limit",
)  # fmt: skip
_SigmoidGate = _structure("_SigmoidGate", pointers="x gate", longs="d gate_stride", ints="each")


@dataclasses.dataclass(frozen=True)
class PackedExperts(ExpertWeights):
    """Experts in panels; the plain matrices keep their shapes and types only.

    Attributes:
        packed_gate_up: of each expert the gate's panels (if it has a gate), then up's.
        packed_down: of each expert its panels.
    """

    packed_gate_up: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    packed_down: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))


def _cpu(op: str):
    return kernel(op, platform="cpu", priority=PRIORITY, unavailable=unavailable)


def _address(tensor: torch.Tensor | None, dtype: torch.dtype, name: str) -> int | None:
    if tensor is None:
        return None
    if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be a contiguous CPU tensor of {dtype}; it is {tensor.dtype} on {tensor.device} with strides"
            f" {tensor.stride()}"
        )
    return tensor.data_ptr()


@_cpu("moe_route")
def moe_route(
    logits_TE: torch.Tensor,
    routing: Routing,
    num_tokens: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    bias_E: torch.Tensor | None = None,
) -> None:
    lib = library()
    call = _Route(
        _address(logits_TE, torch.float32, "logits"),
        _address(bias_E, torch.float32, "bias"),
        _address(ids_TK, torch.int32, "ids"),
        _address(weights_TK, torch.float32, "weights"),
        routing.num_experts,
        routing.top_k,
        routing.groups,
        routing.top_groups,
        SCORINGS[routing.scoring],
        int(routing.renormalize),
        routing.scale,
        routing.jitter,
    )
    lib.run(lib.operation("moe_route"), call, logits_TE.shape[0], (logits_TE, bias_E, ids_TK, weights_TK))


@_cpu("pack_experts")
def pack_experts(experts: ExpertWeights) -> ExpertWeights:
    values = {field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}
    for name in ("gate_up_E2ID", "down_EDI"):
        values[name] = values[name].to("meta")
    return PackedExperts(
        **values,
        packed_gate_up=_pack(experts.gate_up_E2ID.unflatten(1, (-1, experts.intermediate)).flatten(0, 1)),
        packed_down=_pack(experts.down_EDI),
    )


def _pack(matrices_MNK: torch.Tensor) -> torch.Tensor:
    """Matrices one after another, each in panels of its own."""
    lib, (count, n, k) = library(), matrices_MNK.shape
    panels = -(-n // PANEL)
    size = panels * ((k + 1) // 2) * 2 * PANEL
    packed = lib.allocate(count * size, matrices_MNK.dtype)
    if lib.recorder is not None:
        lib.recorder.refuse("a weight was packed")
    for number, matrix_NK in enumerate(matrices_MNK):
        matrix_NK = matrix_NK if matrix_NK.stride(1) == 1 else matrix_NK.contiguous()
        out = packed.data_ptr() + number * size * packed.element_size()
        call = PackArguments(matrix_NK.data_ptr(), out, n, k, matrix_NK.stride(0), DTYPES[packed.dtype])
        lib.run(lib.operation("pack"), call, panels, (matrix_NK, packed))
    return packed


@_cpu("moe_experts")
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
    lib, clamp = library(), experts.clamp
    gate_up, down = experts.packed_gate_up, experts.packed_down
    call = _Experts(
        _address(x_TD, torch.float32, "x"),
        _address(ids_TK, torch.int32, "ids"),
        _address(weights_TK, torch.float32, "weights"),
        _address(out_TD, torch.float32, "out"),
        gate_up.data_ptr(),
        down.data_ptr(),
        _address(experts.gate_up_bias_E2I, torch.float32, "gate_up_bias"),
        _address(experts.down_bias_ED, torch.float32, "down_bias"),
        x_TD.shape[1],
        experts.intermediate,
        experts.count,
        experts.first,
        ids_TK.shape[1],
        DTYPES[gate_up.dtype],
        ACTIVATIONS[kind],
        int(experts.is_gated),
        int(clamp is not None),
        int(experts.scales_input),
        0.0 if clamp is None else clamp.alpha,
        0.0 if clamp is None else clamp.limit,
    )
    tensors = (x_TD, ids_TK, weights_TK, out_TD, gate_up, down, experts.gate_up_bias_E2I, experts.down_bias_ED)
    lib.run(lib.operation("moe_experts"), call, x_TD.shape[0], tensors)


@_cpu("sigmoid_gate")
def sigmoid_gate(x_TI: torch.Tensor, gate_TG: torch.Tensor) -> None:
    lib = library()
    gate, is_each = rows_address(gate_TG, "gate"), int(gate_TG.shape[1] > 1)
    call = _SigmoidGate(_address(x_TI, torch.float32, "x"), gate, x_TI.shape[1], gate_TG.stride(0), is_each)
    lib.run(lib.operation("sigmoid_gate"), call, x_TI.shape[0], (x_TI, gate_TG))
