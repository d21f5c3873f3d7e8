"""A decoder's layers as a list of operations, made once and run in every step.

Knows the order of norms, halves and sums of each placement. The output of a half waits in `delta_TD` until the norm of the next
half adds it to the residual in the same pass; the list is made in order, so it is known beforehand where something waits.

Legend: T tokens of the step, S positions that need logits, D hidden.
"""

import operator
from collections.abc import Callable, Sequence
from typing import cast

import torch

from quire.kernels import ops
from quire.layers.decoder_layer import DecoderLayer
from quire.layers.feed_forward import FeedForwardLayer
from quire.layers.half import Buffer, HalfInput, HalfOutput, NormedInput, ResidualOutput, SampledOutput, SampledViews
from quire.layers.held_weights import apply_norm
from quire.layers.interface import LayerContext, StepInputs
from quire.layers.mixers import MixerLayer
from quire.layers.residual_extras import HyperConnection, LayerEnd
from quire.layers.workspace import TokenViews, Workspace
from quire.models.residual import PRE, RMSNorm
from quire.models.spec import DecoderSpec

Operation = Callable[[StepInputs, TokenViews], object]
SampledOperation = Callable[[StepInputs, TokenViews, SampledViews], None]

RESIDUAL: Buffer = operator.attrgetter("residual_TD")
DELTA: Buffer = operator.attrgetter("delta_TD")
NORMED: Buffer = operator.attrgetter("normed_TD")
BESIDE: Buffer = operator.attrgetter("beside_TD")


class OperationList:
    """The operations of layers that are added in order.

    Args:
        is_fused: layers have plain norms before their halves, and a product does the norm before it and the sum behind it.

    Attributes:
        listed: the operations so far.
        tapped: copies of the residual that operations of the last run have made.
        first_input: what the first layer's mixer reads, where that is not a norm of the residual.
        sampled_mixer: the last mixer for tokens that need logits alone, and its place in the list; None where all tokens are
            computed.
        late_waits: the output of the last layer's experts joins that of a layer that is added later.
    """

    def __init__(self, spec: DecoderSpec, context: LayerContext, workspace: Workspace, *, is_fused: bool) -> None:
        self.listed: list[Operation] = []
        self.tapped: list[torch.Tensor] = []
        self.sampled_mixer: tuple[int, SampledOperation] | None = None
        self._spec, self._context, self._workspace, self.is_fused = spec, context, workspace, is_fused
        self._delta_waits = self.late_waits = False
        self.first_input: HalfInput | None = None

    def add_layer(self, layer: DecoderLayer, number: int, *, can_narrow: bool) -> None:
        """Append a layer's operations.

        Args:
            can_narrow: it is the last one, and may leave out tokens that need no logits.
        """
        if layer.hyper:
            self._add_halves_of_streams(layer)
        elif layer.placement.parallel:
            self._add_parallel_halves(layer)
        else:
            if layer.mixers:
                self._add_mixers(layer, can_narrow)
            if layer.mlp is not None:
                self._add_mlp(layer, layer.mlp)
        if layer.end is not None:
            self.add_delta()
            self.listed.append(self._end(layer.end))
        method = self._context.linear_method
        if method.has_adapters:
            self.listed.append(lambda step, views: method.adapt_residual(f"layers.{number}", views.residual_TD))

    def begin_streams(self) -> None:
        """Append the copies of the embeddings to all residual streams."""
        workspace = self._workspace

        def run(step: StepInputs, views: TokenViews) -> None:
            streams_TND = workspace.streams[: step.num_tokens]
            streams_TND.copy_(views.residual_TD[:, None].expand_as(streams_TND))

        self.listed.append(run)

    def end_streams(self, head: HyperConnection) -> None:
        """Append the sum of the streams, which becomes the residual."""
        workspace = self._workspace
        self.listed.append(lambda step, views: head.read(workspace.streams[: step.num_tokens], views.residual_TD))

    def add_delta(self) -> None:
        """Append the sum of the residual with a half's output, if one waits."""
        scale = self._spec.residual_scale
        if self._delta_waits:
            self.listed.append(lambda step, views: ops.add(views.delta_TD, views.residual_TD, scale))
        self._delta_waits = False

    def add_tap(self) -> None:
        """Append a copy of the residual as it is here."""
        self.add_delta()
        self.listed.append(lambda step, views: self.tapped.append(views.residual_TD.clone()))

    def add_copy(self, out_TD: torch.Tensor, count_up_T: torch.Tensor) -> None:
        """Append a copy of the residual, with what waits to join it, into a buffer; nothing else changes."""
        waits, scale = self._delta_waits, self._spec.residual_scale

        def run(step: StepInputs, views: TokenViews) -> None:
            count = step.num_tokens
            ops.gather_rows(views.residual_TD, count_up_T[:count], out_TD[:count])
            if waits:
                ops.add(views.delta_TD, out_TD[:count], scale)

        self.listed.append(run)

    def add_media(self, number: int) -> None:
        """Append the sum of the residual with what media have for this layer."""

        def run(step: StepInputs, views: TokenViews) -> None:
            if step.media is not None:
                step.media.join(number, views.residual_TD)

        self.listed.append(run)

    # Halves one after the other.

    def _add_mixers(self, layer: DecoderLayer, can_narrow: bool) -> None:
        first, self.first_input = self.first_input, None
        read = first or self._add_input(layer, "before_mixer")
        if can_narrow:
            self.sampled_mixer = (len(self.listed), self._sampled_mixer(layer, read))
        self.listed.append(self._mixers(layer, read))
        self._add_norm_behind(layer, "after_mixer")

    def _add_mlp(self, layer: DecoderLayer, mlp: FeedForwardLayer) -> None:
        read = self._add_input(layer, "before_mlp")
        self.listed.append(self._mlp(mlp, read, DELTA))
        for mixer in layer.mixers:
            if mixer.changes_mlp:
                self.listed.append(self._change_mlp(mixer))
        self._add_norm_behind(layer, "after_mlp")

    def _add_input(self, layer: DecoderLayer, place: str) -> HalfInput:
        """What the next half reads, behind its norm."""
        method = self._context.linear_method
        if self.is_fused:
            return NormedInput(method, layer.norms, place, self._spec.norm.eps)
        return HalfInput(method, self._add_norm_before(layer, place))

    def _output(self, buffer: Buffer) -> HalfOutput:
        """Where a half writes: a buffer, or the residual at once."""
        if self.is_fused:
            return ResidualOutput(self._context.linear_method, is_first=self._context.plan.rank == 0)
        return HalfOutput(self._context.linear_method, buffer)

    def _add_norm_before(self, layer: DecoderLayer, place: str) -> Buffer:
        """Add what waits to the residual; returns where its norm is."""
        has_norm, on_residual = place in layer.norm_places, layer.placement.on_residual
        if not has_norm or on_residual or self._spec.residual_scale != 1.0:
            self.add_delta()
        if not has_norm:
            return RESIDUAL
        if on_residual:
            self._add_norm(layer, place, RESIDUAL, RESIDUAL)
            return RESIDUAL
        if self._delta_waits:
            self._add_norm(layer, place, DELTA, NORMED, joins=True)
        else:
            self._add_norm(layer, place, RESIDUAL, NORMED)
        self._delta_waits = False
        return NORMED

    def _add_norm_behind(self, layer: DecoderLayer, place: str) -> None:
        if self.is_fused:
            return
        has_norm, on_residual = place in layer.norm_places, layer.placement.on_residual
        if has_norm and not on_residual:
            self._add_norm(layer, place, DELTA, DELTA)
        joint = layer.joints.get(place)
        if joint is not None:
            if joint.learned:
                self.listed.append(lambda step, views: views.delta_TD.mul_(layer.join_vectors[place]))
            self._add_scale(RESIDUAL, joint.keep)
            self._add_scale(DELTA, joint.join)
        self._delta_waits = True
        if has_norm and on_residual:
            self.add_delta()
            self._add_norm(layer, place, RESIDUAL, RESIDUAL)

    def _add_norm(self, layer: DecoderLayer, place: str, read: Buffer, write: Buffer, *, joins: bool = False) -> None:
        """Append a norm. With `joins`, what it reads joins the residual first, and the norm is of that."""
        norm = self._spec.norm

        def run(step: StepInputs, views: TokenViews) -> None:
            residual_TD = views.residual_TD if joins else None
            apply_norm(norm, layer.norms[place], read(views), write(views), residual_TD)

        self.listed.append(run)

    def _add_scale(self, buffer: Buffer, scale: float) -> None:
        if scale != 1.0:
            self.listed.append(lambda step, views: ops.scale_and_cap(buffer(views), scale, 0.0))

    # Halves side by side, and halves on several residual streams.

    def _add_parallel_halves(self, layer: DecoderLayer) -> None:
        """Both halves read the same residual; their outputs are added."""
        mlp = cast(FeedForwardLayer, layer.mlp)
        read = self._add_input(layer, "before_mixer")
        self.listed.append(self._mixers(layer, read))
        if "before_mlp" in layer.norm_places:
            self._add_norm(layer, "before_mlp", RESIDUAL, NORMED)
        buffer = NORMED if mlp.mixture is None else BESIDE  # experts do not write where they read
        self.listed.append(self._mlp(mlp, read, buffer))
        self.listed.append(lambda step, views: ops.add(buffer(views), views.delta_TD))
        self._delta_waits = True

    def _add_halves_of_streams(self, layer: DecoderLayer) -> None:
        """Each half reads a sum of the streams, and its output joins all of them."""
        for half, hyper in layer.hyper.items():
            outer, self.listed = self.listed, []
            read = self._add_input(layer, f"before_{half}")
            if half == "mixer":
                self.listed.append(self._mixers(layer, read))
            else:
                self.listed.append(self._mlp(cast(FeedForwardLayer, layer.mlp), read, DELTA))
            outer.append(self._on_streams(hyper, self.listed))
            self.listed = outer

    def _on_streams(self, hyper: HyperConnection, half: list[Operation]) -> Operation:
        workspace = self._workspace

        def run(step: StepInputs, views: TokenViews) -> None:
            streams_TND = workspace.streams[: step.num_tokens]
            weights = hyper.read(streams_TND, views.residual_TD)
            for operation in half:
                operation(step, views)
            hyper.write(streams_TND, weights, views.delta_TD)

        return run

    def _end(self, end: LayerEnd) -> Operation:
        workspace = self._workspace
        return lambda step, views: end.run(views, workspace.inputs[: step.num_tokens])

    # Halves by themselves. Their outputs are summed over ranks.

    def _mixers(self, layer: DecoderLayer, x: HalfInput) -> Operation:
        first, *others = layer.mixers
        out, beside = self._output(DELTA), HalfOutput(self._context.linear_method, BESIDE)
        communicator = self._context.communicator

        def run(step: StepInputs, views: TokenViews) -> None:
            first.run(x, out, step, views)
            for mixer in others:
                mixer.run(x, beside, step, views)
                ops.add(views.beside_TD, out.tensor(views))
            if communicator.size > 1:
                communicator.all_reduce(out.tensor(views))

        return run

    def _sampled_mixer(self, layer: DecoderLayer, x: HalfInput) -> SampledOperation:
        """As `_mixers`, for the tokens that need logits alone; then also the residual is theirs."""
        mixer, whole, communicator = layer.mixers[0], self._output(DELTA), self._context.communicator
        is_fused = self.is_fused

        def run(step: StepInputs, views: TokenViews, sampled: SampledViews) -> None:
            out = SampledOutput(whole, sampled)
            mixer.run(x, out, step, views)
            if step.num_logits:
                communicator.all_reduce(out.tensor(views))
                if not is_fused:
                    ops.gather_rows(views.residual_TD, sampled.index_S, sampled.views.residual_TD)

        return run

    def _change_mlp(self, mixer: MixerLayer) -> Operation:
        return lambda step, views: mixer.change_mlp(step, views.delta_TD)

    def _mlp(self, mlp: FeedForwardLayer, x: HalfInput, buffer: Buffer) -> Operation:
        communicator, out, takes_late = self._context.communicator, self._output(buffer), self.late_waits
        self.late_waits, sums = mlp.is_late, communicator.size > 1 and not mlp.is_whole

        def run(step: StepInputs, views: TokenViews) -> None:
            mlp.run(x, out, step, views)
            if takes_late:
                ops.add(views.beside_TD, out.tensor(views))
            if sums:
                communicator.all_reduce(out.tensor(views))

        return run


def can_fuse(spec: DecoderSpec, layers: Sequence[DecoderLayer]) -> bool:
    """Whether layers are plain enough for products that do norms and sums, and the platform has such kernels."""
    is_scaled = spec.residual_scale != 1.0 or spec.layer_scale or bool(spec.joints)
    has_plain_norms = isinstance(spec.norm, RMSNorm) and all(placement == PRE for placement in spec.placements())
    if is_scaled or not has_plain_norms or spec.layer_input is not None or spec.hyper is not None:
        return False
    mixers_can = all(len(layer.mixers) <= 1 and all(mixer.can_fuse for mixer in layer.mixers) for layer in layers)
    mlps_can = all(layer.mlp is None or layer.mlp.can_fuse for layer in layers)
    return mixers_can and mlps_can and ops.is_native("norm_linear")
