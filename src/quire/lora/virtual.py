"""Parts of an adapter that hold for its virtual tokens alone: rows of the embedding, or keys and values in the layers.

The steps give virtual tokens the adapter's slot. Their ids are 0, 1 and so on: an update that is looked up by id, in the place of
what was computed, is all that is needed. Keys are stored rotated: they are turned back here, and turned by the layer itself.

Methods: https://arxiv.org/abs/2104.08691 (prompt tuning), https://arxiv.org/abs/2103.10385 (P-tuning, of which PEFT saves the
result), https://arxiv.org/abs/2101.00190 (prefix tuning). Knows specs and shapes; knows nothing of files or slots.

Legend: V virtual tokens, D hidden, K KV heads, H head size, R rotary dim, N outputs of the matrix of queries, keys and values.
"""

from collections.abc import Iterator

import torch

from quire.kernels.adapters import AdapterPart
from quire.layers.parallel import ParallelPlan
from quire.lora.method import KEYS
from quire.lora.several import Several
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec


def key_tables(spec: DecoderSpec, plan: ParallelPlan) -> Iterator[tuple[str, Several]]:
    """The tables of layers whose keys and values can be given."""
    for layer in range(spec.layers):
        mixer = _attention(spec, layer)
        if isinstance(mixer, Attention) and not _why_not(mixer):
            heads, kv_heads = plan.share(mixer.heads, "heads"), plan.share(mixer.kv_heads, "KV heads")
            yield f"layers.{layer}.qkv{KEYS}", Several(1, 1, ((heads + 2 * kv_heads) * mixer.head_dim, 0))


def _attention(spec: DecoderSpec, layer: int) -> Attention | None:
    """A layer's mixer, if it is one attention and nothing else."""
    mixers = spec.mixers_of(layer)
    return mixers[0] if len(mixers) == 1 and isinstance(mixers[0], Attention) else None


def _why_not(mixer: Attention | None) -> str:
    """Why a layer's keys and values cannot be given; empty: they can."""
    if mixer is None:
        return "is no plain attention"
    what = {
        "norms its keys": mixer.qk_norm is not None,
        "norms its values": mixer.v_norm is not None,
        "has values that are its keys": mixer.k_is_v,
        "has gates in the matrix of its keys": mixer.output_gate,
        "limits its keys": mixer.clip_qkv > 0,
        "turns its keys by several axes": mixer.rope is not None and bool(mixer.rope.axes),
    }
    return next((why for why, is_so in what.items() if is_so), "")


def embedding_part(spec: DecoderSpec, rows_VD: torch.Tensor) -> AdapterPart:
    """The rows that virtual tokens have. Raises ValueError: they have another width than the model's."""
    width = spec.embedding_width or spec.hidden
    if rows_VD.shape[1] != width:
        raise ValueError(f"has vectors of {rows_VD.shape[1]}, and the model's embedding has {width}")
    if spec.layer_input is not None:
        raise ValueError("has vectors, and the model's layers read token ids, too")
    return _given(rows_VD if spec.scales_given else rows_VD / spec.embedding_scale, torch.zeros(width))


def key_parts(
    spec: DecoderSpec, plan: ParallelPlan, rows_VX: torch.Tensor, max_positions: int
) -> dict[str, AdapterPart]:
    """The keys and values that virtual tokens have in every layer, by table.

    Args:
        rows_VX: for each token [layers, 2, K, H].
        max_positions: that tables of rotations are made for.

    Raises:
        ValueError: they have another size than the model's, or a layer cannot take them.
    """
    parts, numbers = dict[str, AdapterPart](), rows_VX.shape[1]
    for layer in range(spec.layers):
        mixer = _attention(spec, layer)
        if mixer is None or _why_not(mixer):
            raise ValueError(f"has keys and values for layer {layer}, which {_why_not(mixer)}")
        width = 2 * mixer.kv_heads * mixer.head_dim
        if numbers != spec.layers * width:
            shape = f"{spec.layers} layers x 2 x {mixer.kv_heads} heads x {mixer.head_dim}"
            raise ValueError(f"has {numbers} numbers for a virtual token, and the model has {shape}")
        pairs_V2KH = rows_VX[:, layer * width :][:, :width].reshape(-1, 2, mixer.kv_heads, mixer.head_dim)
        pairs_V2KH = pairs_V2KH[:, :, plan.groups(mixer.kv_heads, "KV heads")].clone()
        if mixer.rope is not None:
            turn_back(pairs_V2KH[:, 0], mixer.rope, max_positions)
        queries = plan.share(mixer.heads, "heads") * mixer.head_dim
        stays_N = torch.cat((torch.ones(queries), torch.zeros(pairs_V2KH[0].numel())))
        rows_VN = torch.cat((torch.zeros(len(rows_VX), queries), pairs_V2KH.flatten(1)), dim=1)
        parts[f"layers.{layer}.qkv{KEYS}"] = _given(rows_VN, stays_N)
    return parts


def turn_back(keys_VKH: torch.Tensor, rope: Rope, max_positions: int) -> None:
    """Make of rotated keys at positions 0, 1 and so on what they were before, in place."""
    cos_VR, sin_VR = rope.table(max_positions)[: len(keys_VKH), None].chunk(2, dim=-1)
    half, dim = cos_VR.shape[-1], 2 * cos_VR.shape[-1]
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if rope.interleaved else (slice(0, half), slice(half, dim))
    one, two = keys_VKH[..., first].clone(), keys_VKH[..., second].clone()
    length = cos_VR.square() + sin_VR.square()
    keys_VKH[..., first] = (one * cos_VR + two * sin_VR) / length
    keys_VKH[..., second] = (two * cos_VR - one * sin_VR) / length


def _given(rows_VN: torch.Tensor, stays_N: torch.Tensor) -> AdapterPart:
    """Rows by id in the place of what was computed, but for outputs that stay."""
    count = len(rows_VN)
    return AdapterPart(torch.eye(count), rows_VN.contiguous(), 1, stays_N, torch.zeros(len(stays_N)))
