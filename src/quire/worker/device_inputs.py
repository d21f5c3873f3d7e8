"""A step's way to an asynchronous device: prepared on the host, packed into one array, copied once, unpacked there.

Two steps may be on their way: each packet has its own host memory until the device has read it. Knows nothing of models.

Legend: see `kernels/step.py`.
"""

import numpy as np
import torch

from quire.attention.interface import SHORT_TOKENS, AttentionMetadata
from quire.core.output import IntArray
from quire.kernels import ops
from quire.kernels.step import HEADER, SAMPLE_FIELDS, allocate
from quire.layers.interface import StepInputs
from quire.platforms.interface import DeviceRuntime
from quire.sample.sampling_rows import SamplingRows
from quire.worker.cross_device import CrossOnDevice
from quire.worker.cross_steps import CrossSteps
from quire.worker.input_prep import InputPreparation, PreparedBatch
from quire.worker.step_graphs import StepShape

MAX_UPDATES = 1 << 16
"""Page-table entries that a packet may change; what is more goes before it in packets of its own."""
MAX_KEPT_STEPS = 512
NUM_PACKETS = 4
"""Host copies: two steps in flight, one in the making, and a spare for table entries that go ahead."""


class DeviceInputs:
    """Fills the device's buffers for each step.

    Args:
        host: prepares steps; the page tables of its rows have copies on the device.
        table: sampling parameters of the rows.

    Attributes:
        host: what it was given.
        token_types: what `StepInputs.token_types` is, for models that read it; to be set before the first step.
    """

    _cross: CrossOnDevice | None = None

    def __init__(self, host: InputPreparation, table: SamplingRows, block_size: int, runtime: DeviceRuntime) -> None:
        self._state, self._table, self.host = host.state, table, host
        state = host.state
        self.groups = len(state.tables_RP)
        self._block_size = block_size
        self._runtime = runtime
        sizes = (len(host.input_ids_T), state.max_rows, self.groups, state.row_pages, MAX_UPDATES)
        slots = torch.int32 if host.slots_GT[0].dtype == np.int32 else torch.int64
        self.buffers = allocate(*sizes, runtime.device(), slots, len(host.logits_index_S))
        words = self.buffers.packet.shape[0]
        self._packets = [runtime.pinned(torch.zeros(words, dtype=torch.int32)) for _ in range(NUM_PACKETS)]
        self._views = [packet.numpy() for packet in self._packets]
        self._next = 0
        state.table_updates = []
        self.token_types: torch.Tensor | None = None
        self._axes: torch.Tensor | None = None
        self._axis_packets: list[torch.Tensor] = []
        if host.axes is not None:
            axes = torch.from_numpy(host.axes.axes_TA)
            self._axes = axes.to(runtime.device(), copy=True)
            self._axis_packets = [runtime.pinned(torch.zeros_like(axes)) for _ in range(NUM_PACKETS)]
        self._steps: dict[tuple[int, int, int, int, bool, bool, bool], StepInputs] = {}
        self._longest = state.row_length

    def see_beside(self, cross: CrossSteps | None) -> None:
        """Describe cross attention, too, of a model that has any; to be called before the first step."""
        self._cross = None if cross is None else CrossOnDevice(cross, self.buffers)

    def unpack(self, num_tokens: int, num_requests: int) -> None:
        """Expand the packet on the device."""
        ops.unpack_step(self.buffers, num_tokens, num_requests)
        if self._cross is not None:
            self._cross.fill()

    def upload(self, batch: PreparedBatch) -> None:
        """Copy the prepared step into the device's packet."""
        updates = self._take_updates()
        while len(updates[0]) > MAX_UPDATES:
            self._send_updates(updates[0][:MAX_UPDATES], updates[1][:MAX_UPDATES])
            updates = (updates[0][MAX_UPDATES:], updates[1][MAX_UPDATES:])
        packet = self._views[self._next]
        arrays = self.host
        tokens, requests, max_query_len, max_seq_len = arrays.shape.tolist()
        samples = len(batch.rows_S)
        packet[:6] = (tokens, requests, samples, max_query_len, max_seq_len, len(updates[0]))
        at = HEADER
        for values in (arrays.rows_B[:requests], arrays.seq_lens_B[:requests], arrays.query_start_B[1 : requests + 1]):
            packet[at : at + requests] = values
            at += requests
        self._pack_samples(packet[at : at + SAMPLE_FIELDS * samples].reshape(SAMPLE_FIELDS, samples), batch)
        at += SAMPLE_FIELDS * samples
        for values in (arrays.input_ids_T, arrays.positions_T, *arrays.slots_GT):
            packet[at : at + tokens] = values[:tokens]
            at += tokens
        for values in updates:
            packet[at : at + len(values)] = values
            at += len(values)
        self._send_axes(tokens)
        self._send(at)
        if self._cross is not None:
            self._cross.upload()

    def _send_axes(self, tokens: int) -> None:
        """The tokens' positions on several axes, if the model has them."""
        if self._axes is not None and self.host.axes is not None:
            packet = self._axis_packets[self._next]
            packet.numpy()[:tokens] = self.host.axes.axes_TA[:tokens]
            self._axes[:tokens].copy_(packet[:tokens], non_blocking=True)

    def _pack_samples(self, fields: IntArray, batch: PreparedBatch) -> None:
        rows_S, table = batch.rows_S, self._table
        fields[0] = self.host.logits_index_S[: len(rows_S)]
        fields[1] = rows_S
        fields[2] = batch.positions_S
        table.inverse_temperature_R.view(np.int32).take(rows_S, out=fields[3], mode="clip")
        seeds = table.seed_R.take(rows_S).view(np.int32)
        fields[4], fields[5] = seeds[0::2], seeds[1::2]
        table.top_k_R.take(rows_S, out=fields[6], mode="clip")
        table.top_p_R.view(np.int32).take(rows_S, out=fields[7], mode="clip")
        table.min_p_R.view(np.int32).take(rows_S, out=fields[8], mode="clip")

    def _take_updates(self) -> tuple[IntArray, IntArray]:
        """(flat index, page) of table entries that changed."""
        changes = self._state.table_updates
        assert changes is not None
        if not changes:
            return _NOTHING, _NOTHING
        self._state.table_updates = []
        first_N, count_N = np.array(changes, dtype=np.int32).T
        end_N = np.cumsum(count_N, dtype=np.int32)
        index = np.repeat(first_N - end_N + count_N, count_N) + np.arange(end_N[-1], dtype=np.int32)
        return index, self._state.tables_GRP.take(index)

    def _send_updates(self, index: IntArray, pages: IntArray) -> None:
        packet = self._views[self._next]
        packet[:6] = (0, 0, 0, 0, 0, len(index))
        packet[HEADER : HEADER + len(index)] = index
        packet[HEADER + len(index) : HEADER + 2 * len(index)] = pages
        self._send(HEADER + 2 * len(index))
        ops.unpack_step(self.buffers, 1, 1)
        self._runtime.synchronize()  # rare; the packets' host memory would be written before it was read

    def _send(self, words: int) -> None:
        self.buffers.packet[:words].copy_(self._packets[self._next][:words], non_blocking=True)
        self._next = (self._next + 1) % NUM_PACKETS

    def step(self, shape: StepShape) -> StepInputs:
        """What a model reads, with these bounds; kept, since making it costs more than a small kernel."""
        sizes = (shape.num_tokens, shape.num_requests, shape.num_logits, shape.max_query_len)
        key = (*sizes, shape.is_narrow, shape.decodes, shape.has_short)
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= MAX_KEPT_STEPS:  # eager steps come in every size
                self._steps.clear()
            buffers, columns = self.buffers, self.buffers.columns
            lengths = (buffers.query_start_B, buffers.seq_lens_B, buffers.rows_B, buffers.shape)
            step = self._steps[key] = self._describe(*sizes, *lengths)
            for metadata in step.attention:
                metadata.decodes = shape.decodes
                metadata.short_tokens = SHORT_TOKENS if shape.has_short else 0
            if shape.is_narrow:
                lengths = (buffers.sample_start_S, columns.positions_S, columns.rows_S, buffers.sample_shape)
                count = shape.num_logits  # each as a request of one token
                step.sampled = self._describe(count, count, count, 1, *lengths)
            if self._cross is not None:
                step.attention.append(self._cross.describe(step.attention[0], is_sampled=False))
            if self._cross is not None and step.sampled is not None:
                step.sampled.attention.append(self._cross.describe(step.sampled.attention[0], is_sampled=True))
        return step

    def _describe(
        self,
        tokens: int,
        requests: int,
        logits: int,
        max_query_len: int,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        shape: torch.Tensor,
    ) -> StepInputs:
        buffers = self.buffers
        attention = [
            AttentionMetadata(
                block_size=self._block_size,
                query_start=query_start,
                seq_lens=seq_lens,
                rows=rows,
                block_table=buffers.tables_GRP[group],
                slot_mapping=buffers.slots_GT[group],
                positions=buffers.positions_T,
                shape=shape,
                num_tokens=tokens,
                num_requests=requests,
                max_query_len=max_query_len,
                max_seq_len=self._longest,
            )
            for group in range(self.groups)
        ]
        return StepInputs(
            input_ids=buffers.input_ids_T,
            positions=buffers.positions_T,
            logits_index=buffers.logits_index_S,
            attention=attention,
            num_tokens=tokens,
            num_logits=logits,
            token_types=self.token_types,
            axes=self._axes,
        )


_NOTHING: IntArray = np.zeros(0, dtype=np.int32)
