"""The linear method of every number format: a format says which scheme each matrix has, this does the rest.

A weight's type decides which operations multiply it. What has no kernel that would multiply it as it is stored (experts,
embeddings, float8 on a device without it) is made plain when it is loaded, which `notes` tells.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, cast

import torch

from quire.errors import ConfigError
from quire.kernels import fp8, ops, packed
from quire.kernels.types import FP8, ExpertCodes, Fp8Scratch, Fp8Weight, Int8Weight, LinearWeight, PackedWeight
from quire.layers.linear import PLAIN, Decoded, LinearMethod, PlainProducts, Products, Stored, UnquantizedLinear
from quire.platforms.interface import Capabilities
from quire.quantization import join
from quire.quantization.scheme import DENSE, Form, Scheme, SchemeOf


class PackedProducts(Products):
    """Products of packed weights with inputs as they are."""

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        packed.packed_linear(x_TK, cast(PackedWeight, weight), out_TN)

    def apply_normed_gated(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        kind: str,
        out_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
    ) -> None:
        if ops.is_native("packed_norm_linear_gated"):
            packed.packed_norm_linear_gated(
                x_TD, norm_D, eps, cast(PackedWeight, weight), kind, out_TI, scratch_TD, scratch_T2I
            )
        else:
            super().apply_normed_gated(x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        if ops.is_native("packed_linear_add"):
            packed.packed_linear_add(x_TK, cast(PackedWeight, weight), residual_TN)
        else:
            super().apply_add(x_TK, weight, residual_TN, scratch_TN)


class Int8Products(Products):
    """Products of int8 weights with inputs that are rounded to int8."""

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        packed.int8_linear(x_TK, cast(Int8Weight, weight), out_TN)


class Fp8Products(Products):
    """Products of float8 weights with inputs that are rounded to float8.

    Args:
        scratch: memory for the rounded inputs.
    """

    def __init__(self, scratch: Fp8Scratch) -> None:
        self.scratch = scratch

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        fp8.fp8_linear(x_TK, cast(Fp8Weight, weight), out_TN, self.scratch)

    def apply_normed(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:
        fp8.fp8_norm_linear(x_TD, norm_D, eps, cast(Fp8Weight, weight), out_TN, self.scratch)

    def apply_normed_gated(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        kind: str,
        out_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
    ) -> None:
        fp8.fp8_norm_linear_gated(x_TD, norm_D, eps, cast(Fp8Weight, weight), kind, out_TI, scratch_T2I, self.scratch)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        fp8.fp8_linear_add(x_TK, cast(Fp8Weight, weight), residual_TN, scratch_TN, self.scratch)

    def apply_gated_mlp(
        self,
        residual_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        gate_up: LinearWeight,
        kind: str,
        down: LinearWeight,
        narrow_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
        delta_TD: torch.Tensor,
    ) -> None:
        fp8.fp8_gated_mlp(
            residual_TD,
            norm_D,
            eps,
            cast(Fp8Weight, gate_up),
            kind,
            cast(Fp8Weight, down),
            scratch_T2I,
            narrow_TI,
            delta_TD,
            self.scratch,
        )


GIB = 1 << 30
Create = Callable[[torch.Tensor, torch.Tensor | None, torch.dtype], Decoded]


def is_float8(part: Decoded) -> bool:
    """Whether it takes a device that knows float8."""
    return isinstance(part, Fp8Weight | PackedWeight) and part.data is not None and part.data.dtype is FP8


def _has_kernels(part: PackedWeight, groups: int) -> bool:
    return part.in_features % 2 == 0 if groups == 1 else part.in_features // groups % 8 == 0


class QuantizedLinear(LinearMethod):
    """Matrices in one of the number formats.

    Args:
        name: the format's, as `--quantization` and checkpoints have it.
        scheme_of: how the checkpoint stores each matrix; None: it is a plain one.
        online: makes a layer's weight of a plain checkpoint's matrix, and what that takes.
        stores_embeddings: embeddings have schemes too.
        uses_fp8: some matrices may be multiplied in float8; `needs` makes a device without it an error.
    """

    def __init__(
        self,
        name: str,
        scheme_of: SchemeOf | None = None,
        online: tuple[Create, Form] | None = None,
        uses_fp8: Literal["no", "may", "needs"] = "no",
        stores_embeddings: bool = False,
    ) -> None:
        self.stores_embeddings = stores_embeddings
        self.name, self._online, self._uses_fp8 = name, online, uses_fp8
        self._scheme_of = scheme_of or (lambda source: None)
        self._has_fp8, self._lacks_fp8 = True, ""
        self._experts: Literal["plain", "listed", "stacked"] = "plain"
        self._names: Collection[str] = ()
        self._dense: dict[tuple[str, str], list[int]] = {}
        self._scratch: Fp8Scratch | None = None
        self._keeps_layout = False
        self._products: dict[type, Products] = {
            LinearWeight: PlainProducts(),
            PackedWeight: PackedProducts(),
            Int8Weight: Int8Products(),
        }

    def on_device(self, capabilities: Capabilities) -> None:
        self._has_fp8, self._lacks_fp8 = capabilities.fp8.value, capabilities.fp8.why
        # A device that runs ahead of the host, or takes a mixture in one operation, does not report what its router chose.
        is_asked = not capabilities.async_output.value and not ops.is_native("norm_moe")
        if ops.is_native("pack_expert_codes"):
            self._experts = "stacked"
        else:
            self._experts = "listed" if is_asked and ops.is_native("packed_linear") else "plain"
        if self._uses_fp8 == "needs" and not self._has_fp8:
            raise ConfigError(
                f"quantization={self.name!r} cannot run on this device: {self._lacks_fp8}; int8 and int4 run everywhere",
                setting="quantization",
            )

    # What a checkpoint holds, and how a weight is made of it.

    def see_names(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def scheme(self, source: str) -> Scheme | None:
        """How the checkpoint stores a matrix; None: in a plain type, even where only the names of its tensors show it."""
        if source in self._names:  # all experts in one plain tensor
            return None
        scheme = self._scheme_of(source)
        if scheme is None or f"{source}.weight" not in self._names:
            return scheme
        own = [suffix for suffix, tensor in scheme.tensors.items() if suffix != "weight" and not tensor.optional]
        is_plain = own and not any(f"{source}.{suffix}" in self._names for suffix in own)
        return None if is_plain else scheme

    def stored(self, source: str) -> Mapping[str, Stored]:
        scheme = self.scheme(source)
        return PLAIN if scheme is None else scheme.tensors

    def decode(
        self, source: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Decoded:
        scheme = self.scheme(source)
        assert scheme is not None
        try:
            part = scheme.decode(tensors, shape, dtype)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}", setting=error.setting) from error
        if isinstance(part, PackedWeight) and part.scale is not None and not _has_kernels(part, part.scale.shape[1]):
            part = join.dense(part, dtype)
            self._note(
                part,
                f"stored as {scheme.name}",
                "their groups have no multiple of 8 columns, or all of them an odd number",
            )
        elif is_float8(part) and not self._has_fp8:
            part = join.dense(part, dtype)
            self._note(part, f"stored as {scheme.name}", self._lacks_fp8)
        elif isinstance(part, torch.Tensor):
            self._note(part, f"stored as {scheme.name}", "no kernel multiplies them as they are stored")
        return part

    def dense(self, part: Decoded, dtype: torch.dtype) -> torch.Tensor:
        plain = join.dense(part, dtype)
        if not isinstance(part, torch.Tensor):
            self._note(plain, "of experts or embeddings", "their kernels take nothing else")
        return plain

    def cut(self, part: Decoded, rows: slice, columns: slice) -> Decoded:
        piece = join.cut(part, rows, columns)
        if isinstance(piece, torch.Tensor) and not isinstance(part, torch.Tensor):
            self._note(
                piece, "of which ranks have some columns", "the order of these, or their groups, cannot be cut so"
            )
        return piece

    def join(self, parts: Sequence[Decoded], bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        weight = join.join(parts, bias_N, dtype)
        if type(weight) is LinearWeight and not all(isinstance(part, torch.Tensor) for part in parts):
            for part in parts:
                self._note(part, "that are multiplied together", "not all of them are stored alike")
        return weight if self._keeps_layout else join.ready(weight)

    def keeps_experts(self, source: str, columns: int, dtype: torch.dtype) -> bool:
        return not self._why_plain(source, columns, dtype)

    def _why_plain(self, source: str, columns: int, dtype: torch.dtype) -> str:
        """Why experts stored so become plain; empty: they do not."""
        form = self.form(source)
        if form == DENSE:
            return "this device has no kernel for them" if self.scheme(source) is not None else "they are stored so"
        if self._experts != "stacked":
            is_kept = self._experts == "listed" and form.kind == "packed"
            return "" if is_kept else "no kernel here takes experts as they are stored"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"the kernel for experts in codes is for bfloat16 and float16, not {dtype}".replace("torch.", "")
        if not form.fits_tiles or (form.group < columns and form.group % 16):
            return (
                "the kernel for experts in codes takes whole numbers with whole zeros (in 4 bits), or places in a "
                "table, in groups of adjacent columns, a multiple of 16"
            )
        return ""

    def join_expert(self, parts: Sequence[Decoded], dtype: torch.dtype) -> LinearWeight:
        if self._online is not None:
            make = self._online[0]
            parts = [make(part, None, dtype) if isinstance(part, torch.Tensor) else part for part in parts]
        return join.join(parts, None, dtype)

    def ready_experts(
        self, experts: list[LinearWeight], *, is_gated: bool
    ) -> list[LinearWeight] | ExpertCodes | torch.Tensor:
        if self._experts != "stacked":
            return [join.ready(experts.pop(0)) for _ in range(len(experts))]
        codes = [each for weight in experts if (each := join.codes([weight])) is not None]
        if len(codes) == len(experts):
            experts.clear()
            if (stack := packed.pack_expert_codes(codes, is_gated=is_gated)) is not None:
                return stack
            experts += codes
        first = experts[0]
        device = next(value.device for value in vars(first).values() if isinstance(value, torch.Tensor))
        shape = len(experts), first.out_features, first.in_features
        plain = torch.empty(shape, dtype=first.dtype, device=device)
        for matrix in plain:
            matrix.copy_(join.dense(experts.pop(0), first.dtype))
            self._note(matrix, "of experts", "the kernel for experts in codes takes others, or all of one kind")
        return plain

    def create(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        if self._online is None:
            return UnquantizedLinear().create(weight_NK, bias_N, dtype)
        return self.join([self._online[0](weight_NK, None, dtype)], bias_N, dtype)

    @contextlib.contextmanager
    def keeping_layout(self) -> Iterator[None]:
        """Weights that are made meanwhile stay in the layout that all kernels know, to be saved rather than multiplied."""
        self._keeps_layout = True
        try:
            yield
        finally:
            self._keeps_layout = False

    def form(self, source: str) -> Form:
        """What a layer's matrix becomes on the device."""
        scheme = self.scheme(source)
        if scheme is None:
            return DENSE if self._online is None else self._online[1]
        return DENSE if scheme.form.kind in ("fp8", "float8") and not self._has_fp8 else scheme.form

    def weight_bytes(self, sources: Sequence[str], out_features: int, in_features: int, dtype: torch.dtype) -> int:
        form, *others = (self.form(source) for source in sources)
        for other in others:
            form = form.joined(other)
        return form.num_bytes(out_features, in_features, dtype)

    def describe(self, source: str) -> str:
        scheme = self.scheme(source)
        if scheme is None:
            return self.name if self._online is not None else "plain"
        return f"{scheme.name}, made plain" if self.form(source) == DENSE else scheme.name

    def describe_experts(self, source: str, columns: int, dtype: torch.dtype) -> str:
        scheme, why = self.scheme(source), self._why_plain(source, columns, dtype)
        if scheme is None:
            return self.name if self._online is not None and not why else "plain"
        return f"{scheme.name}, made plain: {why}" if why else scheme.name

    def _note(self, part: Decoded, which: str, why: str) -> None:
        rows, columns = part.shape if isinstance(part, torch.Tensor) else (part.out_features, part.in_features)
        count = self._dense.setdefault((which, why), [0, 0])
        count[0], count[1] = count[0] + 1, count[1] + rows * columns * part.dtype.itemsize

    def notes(self) -> list[str]:
        return [
            f"{count} {'matrix' if count == 1 else 'matrices'} {which} {'was' if count == 1 else 'were'} made plain and "
            f"took {num_bytes / GIB:.2f} GiB: {why}"
            for (which, why), (count, num_bytes) in self._dense.items()
        ]

    # Products.

    def reserve(self, max_tokens: int, max_inputs: int, device: torch.device) -> None:
        if self._has_fp8 and self._uses_fp8 != "no":
            self._scratch = Fp8Scratch(max_tokens, max_inputs, device)
            self._products[Fp8Weight] = Fp8Products(self._scratch)

    @property
    def scratch_bytes(self) -> int:
        return 0 if self._scratch is None else self._scratch.num_bytes

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        self._products[type(weight)].apply(x_TK, weight, out_TN)

    def apply_normed(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:
        self._products[type(weight)].apply_normed(x_TD, norm_D, eps, weight, out_TN, scratch_TD)

    def apply_normed_gated(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        kind: str,
        out_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
    ) -> None:
        products = self._products[type(weight)]
        products.apply_normed_gated(x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        self._products[type(weight)].apply_add(x_TK, weight, residual_TN, scratch_TN)

    def apply_gated_mlp(
        self,
        residual_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        gate_up: LinearWeight,
        kind: str,
        down: LinearWeight,
        narrow_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
        delta_TD: torch.Tensor,
    ) -> None:
        products = self._products[type(gate_up)] if type(gate_up) is type(down) else super()
        products.apply_gated_mlp(
            residual_TD, norm_D, eps, gate_up, kind, down, narrow_TI, scratch_TD, scratch_T2I, delta_TD
        )
