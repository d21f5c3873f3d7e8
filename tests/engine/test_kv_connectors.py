"""KV connectors: pages that go to a tier and come back give the tokens of computing them; what cannot be had is computed."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.config.kv_transfer import read_kv_transfer_config
from quire.core.cost_model import MIN_OBSERVATIONS
from quire.errors import ConfigError
from quire.worker import page_connector
from quire.worker.kv_tiers import DiskTier, PageRows

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 400, "kv_cache_memory_bytes": 24 << 20, "max_num_seqs": 4,
    "max_num_batched_tokens": 128, "disable_log_stats": True,
}  # fmt: skip
PROMPT = [3 + (i * i * 31 + i) % 300 for i in range(150)]
PAGE = 16
WHOLE = 144  # tokens of whole pages of the prompt


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), max_position_embeddings=16384)


@contextlib.contextmanager
def engine(model: Path, folder: Path | None = None, **given: Any) -> Iterator[LLM]:
    """An engine with the disk tier in a folder, or with other settings."""
    transfer = given.pop("transfer", {})
    extra = {"path": str(folder), **given.pop("extra", {})}
    config = {"kv_connector": "disk", "kv_connector_extra_config": extra, **transfer}
    with LLM(str(model), kv_transfer_config=config if folder else transfer or None, **{**SETTINGS, **given}) as llm:
        yield llm


def ask(llm: LLM, *prompts: list[int], **fields: Any) -> list[tuple[list[int], int]]:
    """Each request's tokens, and how many of its prompt were not computed."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    asked: Any = [{"prompt_token_ids": prompt, **fields} for prompt in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    with engine(llama) as llm:
        return ask(llm, PROMPT)[0][0]


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in ("secret", "lock"))


def test_a_known_prefix_of_8k_tokens_needs_no_prefill_after_a_restart(llama: Path, tmp_path: Path) -> None:
    prompt = [3 + (i * 7919 + i * i) % 300 for i in range(8200)]
    long: dict[str, Any] = {"max_model_len": 8300, "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 2048}
    with engine(llama, tmp_path, **long) as llm:
        (first,) = ask(llm, prompt)
    with engine(llama, tmp_path, **long) as llm:
        (second,) = ask(llm, prompt)
    assert first[1] == 0 and second == (first[0], 8192)


PROGRAM = """
import sys, time
from tests.engine.test_kv_connectors import PROMPT, SETTINGS, ask
from quire import LLM
from quire.worker import page_connector
from quire.worker.kv_tiers import DiskTier, PageRows
write = DiskTier.write
def slow(*page):
    time.sleep(0.05)
    return write(*page)
DiskTier.write = slow
def main(model, folder):
    config = {"kv_connector": "disk", "kv_connector_extra_config": {"path": folder}}
    llm = LLM(model, kv_transfer_config=config, **SETTINGS)
    ask(llm, PROMPT)
    return llm
kept = main(*sys.argv[2:])
if sys.argv[1] == "dropped":
    del kept
"""


@pytest.mark.parametrize("engine_is", ["kept", "dropped"])
def test_a_program_that_ends_without_ending_its_engine_has_its_pages_saved(
    llama: Path, tmp_path: Path, engine_is: str
) -> None:
    words = [sys.executable, "-c", PROGRAM, engine_is, str(llama), str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert len(files_of(tmp_path)) == WHOLE // PAGE


def test_pages_of_a_tier_give_the_tokens_of_computing_them(llama: Path, expected: list[int], tmp_path: Path) -> None:
    with engine(llama, tmp_path) as llm:
        assert ask(llm, PROMPT) == [(expected, 0)]
    with engine(llama, tmp_path) as llm:
        assert ask(llm, PROMPT, PROMPT[:40])[0] == (expected, WHOLE)
        assert ask(llm, PROMPT) == [(expected, WHOLE)]  # from the device's own cache


@pytest.mark.exhaustive
def test_copies_share_a_folder_and_each_finds_what_another_saved_after_a_restart(
    llama: Path, expected: list[int], tmp_path: Path
) -> None:
    copies: dict[str, Any] = {"data_parallel_size": 2, "max_num_seqs": 2}
    others = [[7 + number] * 40 for number in range(3)]
    with engine(llama, tmp_path, **copies) as llm:
        first = ask(llm, PROMPT, *others)
        assert ask(llm, PROMPT)[0][0] == expected  # what is saved is told with a later step
    saved = files_of(tmp_path)
    assert first[0] == (expected, 0) and len(saved) >= 9 and len({file.name for file in saved}) == len(saved)
    with engine(llama, tmp_path, **copies) as llm:
        found = ask(llm, *[PROMPT] * 4)  # both are asked
    assert found == [(expected, WHOLE)] * 4 and files_of(tmp_path) == saved


def test_a_tier_in_memory_has_what_the_devices_cache_has_lost(llama: Path, expected: list[int]) -> None:
    with engine(llama, transfer={"kv_connector": "memory"}) as llm:
        assert ask(llm, PROMPT) == [(expected, 0)]
        found = 0
        for number in range(100):  # a thread saves, and what it has saved is told with later steps
            ask(llm, [number + 5] * 20)
            llm.reset_prefix_cache()
            ((tokens, found),) = ask(llm, PROMPT)
            assert tokens == expected
            if found == WHOLE:
                break
        assert found == WHOLE
        llm.llm_engine.reset_prefix_cache(reset_connector=True)
        assert ask(llm, PROMPT) == [(expected, 0)]


def test_a_slow_tier_is_not_waited_for_and_is_asked_again_when_it_is_fast(
    llama: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(llama, tmp_path) as llm:
        ask(llm, PROMPT)
    read, is_fast, num_asked = DiskTier.read, threading.Event(), 0

    def slow(self: DiskTier, name: bytes) -> Any:
        nonlocal num_asked
        num_asked += 1
        is_fast.wait()
        return read(self, name)

    monkeypatch.setattr(DiskTier, "read", slow)
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(engine(llama, tmp_path, enable_prefix_caching=False))
        stack.callback(is_fast.set)  # before the engine ends
        for number in range(MIN_OBSERVATIONS):  # the core learns what prompts cost
            ask(llm, [number + 5, *PROMPT])
        assert num_asked == 0
        assert ask(llm, PROMPT) == [(expected, 0)] and 0 < num_asked <= page_connector.PAGE_READERS
        is_fast.set()
        for _ in range(1000):  # a slow place is forgiven, little by little
            tokens, cached = ask(llm, PROMPT)[0]
            assert tokens == expected
            if cached:
                break
        assert cached == WHOLE


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_being_fetched_is_not_used_after_the_cache_was_cleared(
    llama: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """It is of weights that are no longer there."""
    with engine(llama, tmp_path) as llm:
        ask(llm, PROMPT)
    read, begun, may_end = DiskTier.read, threading.Event(), threading.Event()

    def held(self: DiskTier, name: bytes) -> Any:
        begun.set()
        may_end.wait()
        if fails:
            raise OSError("the disk is gone")
        return read(self, name)

    monkeypatch.setattr(DiskTier, "read", held)
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(engine(llama, tmp_path))
        stack.callback(may_end.set)  # before the engine ends
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        llm.llm_engine.add_request("fetches", {"prompt_token_ids": PROMPT}, params)
        assert not llm.llm_engine.step() and begun.wait(60)
        llm.llm_engine.reset_prefix_cache(reset_connector=True)
        may_end.set()
        outputs: list[Any] = []
        while not (outputs and outputs[-1].finished):
            outputs += llm.llm_engine.step()
        assert list(outputs[-1].outputs[0].token_ids) == expected and not outputs[-1].num_cached_tokens
        assert ask(llm, PROMPT[:40])  # and the engine lives


@pytest.mark.parametrize("fault", ["a bit", "shorter", "missing", "empty"])
def test_what_is_damaged_or_missing_is_computed_and_saved_again(
    llama: Path, expected: list[int], tmp_path: Path, fault: str
) -> None:
    with engine(llama, tmp_path) as llm:
        ask(llm, PROMPT)
    files = files_of(tmp_path)
    assert len(files) == WHOLE // PAGE
    victim = files[4]
    data = victim.read_bytes()
    if fault == "missing":
        victim.unlink()
    else:
        changed = {"a bit": data[:100] + bytes([data[100] ^ 1]) + data[101:], "shorter": data[:-1], "empty": b""}
        victim.write_bytes(changed[fault])
    with engine(llama, tmp_path) as llm:
        tokens, cached = ask(llm, PROMPT)[0]
        assert tokens == expected and cached < WHOLE
    assert victim.read_bytes() == data
    with engine(llama, tmp_path) as llm:
        assert ask(llm, PROMPT) == [(expected, WHOLE)]


def test_a_tier_is_no_larger_than_it_may_be(llama: Path, expected: list[int], tmp_path: Path) -> None:
    with engine(llama, tmp_path) as llm:
        ask(llm, PROMPT)
    size = files_of(tmp_path)[0].stat().st_size
    most = 4 * size + 100
    with engine(llama, tmp_path, extra={"max_bytes": most}) as llm:
        for number in range(4):
            ask(llm, [number + 5, *PROMPT[:60]])
    assert 0 < sum(file.stat().st_size for file in files_of(tmp_path)) <= most
    with engine(llama, tmp_path, extra={"max_bytes": most}) as llm:
        assert ask(llm, PROMPT)[0][0] == expected


def test_of_more_pages_than_may_wait_the_first_ones_are_saved(
    llama: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(llama, tmp_path / "whole") as llm:
        ask(llm, PROMPT)
    size = files_of(tmp_path / "whole")[0].stat().st_size
    monkeypatch.setattr(page_connector, "MOST_UNSAVED", 3 * size)
    with engine(llama, tmp_path / "part", max_num_batched_tokens=256) as llm:  # the prompt is one step
        ask(llm, PROMPT)
    with engine(llama, tmp_path / "part") as llm:
        ((tokens, found),) = ask(llm, PROMPT)
    assert tokens == expected and found in (2 * PAGE, 3 * PAGE)  # a file has a checksum, too


def test_a_row_is_used_anew_when_nobody_holds_it() -> None:
    sizes: list[int] = []

    def allocate(rows: int) -> torch.Tensor:
        sizes.append(rows)
        return torch.zeros(rows, 8, dtype=torch.uint8)

    rows = PageRows(allocate, most=5, block=2)
    with pytest.raises(OSError, match="not there yet"):
        rows.take()
    rows.fill()
    held = [rows.take().fill_(number) for number in range(5)]
    assert sizes == [2, 2, 1] and [int(row[0]) for row in held] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="in use"):
        rows.take()
    place, view = held[3].data_ptr(), held[3][:4]
    del held[3]
    assert rows.take().data_ptr() == place and view is not None
    assert [int(row[0]) for row in held] == [0, 1, 2, 4]


def test_a_full_disk_stops_nothing(
    llama: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", rename)
    with engine(llama, tmp_path) as llm:
        assert ask(llm, PROMPT) == [(expected, 0)]
    assert files_of(tmp_path) == []


def test_other_weights_and_other_salts_find_nothing(llama: Path, tmp_path: Path) -> None:
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", max_position_embeddings=16384)
    with engine(model, tmp_path / "kv") as llm:
        ask(llm, PROMPT, cache_salt="mine")
    with engine(model, tmp_path / "kv") as llm:
        assert [ask(llm, PROMPT, cache_salt=salt)[0][1] for salt in ("yours", "mine")] == [0, WHOLE]
    os.utime(model / "model.safetensors", (1, 1))  # as a file that was written anew
    with engine(model, tmp_path / "kv") as llm:
        assert ask(llm, PROMPT, cache_salt="mine")[0][1] == 0


@pytest.mark.parametrize(("role", "saved", "found"), [("kv_consumer", 0, 0), ("kv_producer", WHOLE // PAGE, 0)])
def test_a_role_only_saves_or_only_loads(llama: Path, tmp_path: Path, role: str, saved: int, found: int) -> None:
    for _ in range(2):
        with engine(llama, tmp_path, transfer={"kv_role": role}) as llm:
            assert ask(llm, PROMPT)[0][1] == found
    assert len(files_of(tmp_path)) == saved


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.exhaustive)]
)
def test_each_rank_has_its_part_of_a_page(
    llama: Path, expected: list[int], tmp_path: Path, ranks: dict[str, int]
) -> None:
    with engine(llama, tmp_path, **ranks) as llm:
        assert ask(llm, PROMPT) == [(expected, 0)]
    files = files_of(tmp_path)
    assert len(files) == 2 * WHOLE // PAGE and {file.parts[-3] for file in files} == {"rank0", "rank1"}
    with engine(llama, tmp_path, **ranks) as llm:
        assert ask(llm, PROMPT) == [(expected, WHOLE)]
    next(file for file in files if "rank1" in file.parts).unlink()
    with engine(llama, tmp_path, **ranks) as llm:
        assert ask(llm, PROMPT)[0][0] == expected


def test_a_request_that_is_given_up_while_it_waits_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    with engine(llama, tmp_path) as llm:
        ask(llm, PROMPT)
    with engine(llama, tmp_path) as llm:
        core: Any = llm.llm_engine
        params = SamplingParams(max_tokens=4, temperature=0.0)
        core.add_request("given-up", {"prompt_token_ids": PROMPT}, params)
        core.abort_request(["given-up"])
        assert ask(llm, PROMPT)[0][1] == WHOLE


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_connector": "nfs"}, "kv_transfer_config='nfs' is not known"),
        ({"kv_role": "kv_both"}, "names no kv_connector; there are disk, hidden_states, "),
        ({"kv_connector": "disk"}, "path=None must be a folder"),
        ({"kv_connector": "disk", "kv_connector_extra_config": {"pth": "x"}}, "has 'pth'; 'disk' knows"),
        (
            {"kv_connector": "memory", "kv_connector_extra_config": {"max_bytes": 0}},
            "max_bytes=0 must be a whole number",
        ),
        ({"kv_connector": "memory", "kv_role": "both"}, "kv_transfer_config.kv_role='both'"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_key(llama: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused, engine(llama, transfer=config):
        pass
    assert refused.value.setting == "kv_transfer_config"


def test_layers_with_windows_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model("Gemma3ForCausalLM", tmp_path, tokenizer=False)
    with (
        pytest.raises(ConfigError, match="windows or states"),
        engine(model, transfer={"kv_connector": "memory"}, max_model_len=200),
    ):
        pass


def test_connectors_of_vllm_that_do_the_same_are_known_by_their_names() -> None:
    example = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "here"}}
    read = read_kv_transfer_config(example)
    assert read is not None and (read.kv_connector, read.kv_connector_extra_config) == ("disk", {"path": "here"})
    offload = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    read = read_kv_transfer_config(offload)
    assert read is not None and (read.kv_connector, read.extra("max_bytes")) == ("memory", {"max_bytes": 1 << 20})
