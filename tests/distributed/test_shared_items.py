"""Items of prompts whose encoding ranks divide among themselves: each has all embeddings, and has encoded its share only."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.thread_ranks import on_ranks
from tests.models.test_parity_vision import IMAGES, PROMPTS, assert_sees
from tests.oracles.async_platform import AsyncCpuRuntime
from tests.oracles.media_parity import COMMON
from tests.oracles.tiny_vision import VisionOracle, make_tiny_vision

from quire import LLM
from quire.distributed.communicator import Communicator
from quire.media import EMBEDS, MediaItem, MediaTensor
from quire.worker.item_encoder import ItemEncoder

COLUMNS = 3


class CountingTower:
    """A row is its item's first number and its place."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def encode(self, items):
        self.seen += [float(item["pixels"][0]) for item in items]
        return [rows_of(float(item["pixels"][0]), len(item["pixels"])) for item in items]


def rows_of(number: float, count: int) -> torch.Tensor:
    return torch.arange(float(count))[:, None] + torch.tensor([number, -number, 1.0])


def make_item(number: int, count: int, modality: str = "image") -> MediaItem:
    pixels = MediaTensor.from_array(np.full(count, number, np.float32))
    return MediaItem(f"item {number}", modality, 0, count, 9, count, tensors={"pixels": pixels})


def encode(ranks: Communicator, steps: list[list[MediaItem]], *, is_beside: bool) -> tuple[list[float], list[float]]:
    """What one rank has encoded of images and of sounds; it has the embeddings of all."""
    towers: dict[str, Any] = {"image": CountingTower(), "audio": CountingTower()}
    like = torch.zeros(1, COLUMNS)
    encoder = ItemEncoder(towers, 1.0, 64, like, AsyncCpuRuntime(), ranks, is_beside=is_beside)
    for number, items in enumerate(steps):
        if is_beside and number % 2:
            encoder.begin(items).result()
        else:
            encoder.take(items)
        keys = [item.key for item in items]
        encoder.drop(keys[5:6])
        del keys[5:6]
        encoder.need(keys[1:])  # the first one is needed by the next step only
        encoder.need(keys)
        for item in items:
            if item.key in keys:
                number = float(item.key.split()[1])
                given = EMBEDS in item.tensors
                expected = torch.full((item.num_embeds, COLUMNS), number) if given else rows_of(number, item.num_embeds)
                assert torch.equal(encoder[item.key], expected), item.key
    encoder.stop()
    return towers["image"].seen, towers["audio"].seen


@pytest.mark.parametrize("is_beside", [False, True])
def test_each_rank_encodes_its_share_and_has_all(is_beside):
    given = make_item(90, 2)
    given.tensors = {EMBEDS: MediaTensor.from_array(np.full((2, COLUMNS), 90, np.float32))}
    steps = [
        [make_item(number, count) for number, count in enumerate((4, 9, 1, 3, 3, 1, 5))],
        [make_item(10, 6), make_item(11, 2, "audio"), make_item(12, 2, "audio"), given],
        [make_item(20, 5)],  # fewer than ranks
        [make_item(21, 5)],
        [make_item(22, 5)],
    ]
    seen = on_ranks(3, lambda ranks: encode(ranks, steps, is_beside=is_beside))
    images, sounds = [[number for each in seen for number in each[kind]] for kind in (0, 1)]
    assert sorted(images) == [0, 1, 2, 3, 4, 6, 10, 20, 21, 22] and sorted(sounds) == [11, 12]
    rows = {number: item.num_embeds for step in steps for item in step for number in [float(item.key.split()[1])]}
    loads = [sum(rows[number] for number in own) for own, _ in seen]
    assert max(loads) - min(loads) <= max(rows.values()), loads
    assert max(len(own) for _, own in seen) == 1, "one rank hears everything"


def test_a_single_rank_encodes_everything():
    (seen,) = on_ranks(1, lambda ranks: encode(ranks, [[make_item(1, 2), make_item(2, 3)]], is_beside=False))
    assert sorted(seen[0]) == [1, 2]


@pytest.mark.parametrize("mode", ["data", "weights"])
def test_two_processes_see_what_transformers_sees(mode, tmp_path):
    """With rows that join behind the first layers (DeepStack)."""
    path = make_tiny_vision("Qwen3VLForConditionalGeneration", tmp_path)
    settings = {"tensor_parallel_size": 2, "worker_cls": "tests.distributed.counting_worker:CountingWorker"}
    with LLM(str(path), dtype="float32", mm_encoder_tp_mode=mode, **(COMMON | settings)) as llm:
        assert_sees(llm, VisionOracle(path), PROMPTS, max_tokens=4)
        first, second = (sorted(keys) for keys in llm.collective_rpc("encoded"))
    assert len(first + second) == (1 if mode == "data" else 2) * len(IMAGES.keys() - {"thin"})
    assert first and (first == second) is (mode == "weights"), (first, second)
