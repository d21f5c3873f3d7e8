"""However rows with a grammar are mixed with others, each draws from what its own mask leaves, and nobody else is touched."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sample.helpers import draw

from quire.platforms.interface import HostMemory
from quire.sample.sampler import Sampler
from quire.sampling_params import SamplingParams, StructuredOutputsParams

VOCAB = 100
WORDS = 4


class FixedMasks:
    """Rows follow a number: the mask that they have at every step. Rows with the same number share a line."""

    jumps = False

    def __init__(self, masks_NW: npt.NDArray[np.int32]) -> None:
        self.masks_NW = masks_NW

    def start(self, params: SamplingParams) -> int:
        assert params.structured_outputs is not None and params.structured_outputs.regex is not None
        return int(params.structured_outputs.regex)

    def forced(self, rows: Sequence[tuple[Any, Sequence[int]]]) -> dict[int, list[int]]:
        return {}

    def begin_fill(
        self,
        rows: Sequence[tuple[Any, Sequence[int]]],
        masks_NW: npt.NDArray[np.int32],
        alone: Collection[int] | None = None,
    ) -> "FixedMasks.Filled":
        lines: dict[Any, int] = {}
        line_N: list[int] = []
        for index, (number, _) in enumerate(rows):
            key = -1 - index if alone is None or index in alone else number
            line = lines.setdefault(key, len(lines))
            masks_NW[line] = self.masks_NW[number]
            line_N.append(line)
        return self.Filled(line_N, len(lines))

    class Filled:
        def __init__(self, line_N: list[int], num_lines: int) -> None:
            self.line_N, self.num_lines = line_N, num_lines

        def finish(self) -> dict[int, str]:
            return {}


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(
        st.sampled_from(["free", "form", "form", "form", "form and bias", "form and words", "bias"]),
        min_size=1,
        max_size=9,
    ),
    seed=st.integers(0, 999),
)
def test_every_row_draws_what_its_mask_leaves(kinds: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    allowed_NV = rng.random((3, VOCAB)) < rng.choice([0.05, 0.5, 0.97])
    allowed_NV[:, 7] = True
    bits = np.zeros((3, WORDS * 32), dtype=np.bool_)
    bits[:, :VOCAB] = allowed_NV
    masks_NW = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    made = Sampler(16, VOCAB, HostMemory(), grammars=FixedMasks(masks_NW))
    logits_SV = torch.from_numpy(rng.standard_normal((len(kinds), VOCAB)).astype(np.float32))
    expected: list[int] = []
    rows_S = rng.permutation(16)[: len(kinds)].astype(np.int32)
    for index, kind in enumerate(kinds):
        number = int(rng.integers(3))
        params = SamplingParams(temperature=0.0)
        wanted_V = logits_SV[index].numpy().copy()
        if "bias" in kind:
            params.logit_bias = {5: 2.0, 9: -3.0}
            wanted_V[[5, 9]] += np.array([2.0, -3.0], dtype=np.float32)
        if "words" in kind:
            banned = int(np.argmax(np.where(allowed_NV[number], wanted_V, -np.inf)))
            if banned != 7:
                params.bad_words_token_ids = [[banned]]
                wanted_V[banned] = -np.inf
        if "form" in kind:
            params.structured_outputs = StructuredOutputsParams(regex=str(number))
            wanted_V[~allowed_NV[number]] = -np.inf
        made.add_row(int(rows_S[index]), params, [1, 2], [], 0)
        expected.append(int(np.argmax(wanted_V)))
    output = draw(made, logits_SV, rows_S, np.full(len(kinds), 2))
    assert output.token_ids.tolist() == expected and not output.errors
