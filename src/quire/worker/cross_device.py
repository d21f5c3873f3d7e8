"""The description of a step for cross attention on a device that works beside the host.

Each row's length and pages have copies on the device, changed when a request gets a row. What a step needs of them is gathered
there, by the rows of its packet, so that a captured step finds it.

Legend: R rows, P pages of an item, B requests of the step, S rows that sample.
"""

import dataclasses

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.step import StepBuffers
from quire.worker.cross_steps import CrossSteps


class CrossOnDevice:
    """Device tensors of fixed address.

    Args:
        buffers: the step's, as they are unpacked.
    """

    def __init__(self, steps: CrossSteps, buffers: StepBuffers) -> None:
        self._steps, self._buffers = steps, buffers
        rows, pages = steps.tables_RP.shape
        like = buffers.seq_lens_B
        self._lens_R = like.new_zeros(rows + 1)  # the last one is of rows that nobody has
        self._tables_RP = like.new_zeros(rows + 1, pages)
        self._lens_B, self._lens_S = torch.zeros_like(like), torch.zeros_like(buffers.columns.rows_S)
        self._shapes = (torch.zeros_like(buffers.shape), torch.zeros_like(buffers.sample_shape))

    def upload(self) -> None:
        """Tell the device of the rows that have changed."""
        if not self._steps.changed:
            return
        rows = torch.tensor(sorted(self._steps.changed))
        self._steps.changed.clear()
        device = self._lens_R.device
        lens, tables = (torch.from_numpy(values)[rows] for values in (self._steps.lens_R, self._steps.tables_RP))
        self._lens_R.index_copy_(0, rows.to(device), lens.to(device))
        self._tables_RP.index_copy_(0, rows.to(device), tables.to(device))

    def describe(self, like: AttentionMetadata, *, is_sampled: bool) -> AttentionMetadata:
        """As a description of the requests' own pages, or of the rows that sample."""
        return dataclasses.replace(
            like,
            seq_lens=self._lens_S if is_sampled else self._lens_B,
            block_table=self._tables_RP,
            shape=self._shapes[is_sampled],
            max_seq_len=self._steps.longest,
        )

    def fill(self) -> None:
        """Gather what the unpacked step needs; what stands behind its own counts has length 0."""
        buffers = self._buffers
        torch.index_select(self._lens_R, 0, buffers.rows_B, out=self._lens_B)
        self._lens_B.mul_(buffers.seq_lens_B > 0)
        torch.index_select(self._lens_R, 0, buffers.columns.rows_S, out=self._lens_S)
        for own, shape in zip(self._shapes, (buffers.shape, buffers.sample_shape), strict=True):
            own.copy_(shape)
            own[3].fill_(self._steps.longest)
