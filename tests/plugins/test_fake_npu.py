"""A device that Quire does not know, from a package that pip installed: the whole engine runs on it, and nothing is patched."""

import ast
import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from tests.models.test_drawn_configs import COMMON, decoder
from tests.oracles import fake_npu
from tests.oracles.tiny_encoder_decoder import CONFIGS, make_tiny_encoder_decoder
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.conformance.engine_checks import ask, compare, prompts_of
from quire.entrypoints.cli.main import main
from quire.platforms import current_platform

__all__ = ["decoder"]

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 16 << 20,
    "disable_log_stats": True,
    "dtype": "float32",
}
BY_DEFAULT = ("AfmoeForCausalLM", "GemmaForCausalLM", "MiniCPM3ForCausalLM", "OpenAIGPTLMHeadModel", "MambaForCausalLM")
"""Architectures of the usual run; all of them are `exhaustive`."""


def conformance(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    report = folder / "report.json"
    code = main(["conformance", "--platform", "npu", "--jobs", "1", "--json", str(report), *words])
    return code, json.loads(report.read_text())


def outcomes(report: dict[str, Any], outcome: str) -> list[str]:
    return [each["name"] for each in report["checks"] if each["outcome"] == outcome]


def test_the_plugin_is_asked_and_answers_for_this_machine(npu: None) -> None:
    assert [current_platform(name).name for name in ("auto", "npu", "cpu")] == ["npu", "npu", "cpu"]


def test_the_quick_suite_passes_and_leaves_little_unclaimed(npu: None, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, report = conformance(tmp_path, "--quick", "--html", str(page))
    assert (code, outcomes(report, "fail"), outcomes(report, "error")) == (0, [], [])
    unclaimed = {name for name in outcomes(report, "not claimed") if not name.startswith("kernels/")}
    assert unclaimed == {
        "capabilities/fp8",
        "device/bandwidth",
        "device/capture",
        "device/profiler",
        "device/record",
        "engine/deterministic",
        "engine/quantized-fp8",
    }
    assert "Nothing failed." in page.read_text()


def test_one_step_in_flight_gives_the_same(npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAKE_NPU_MODE", "sync")
    code, report = conformance(
        tmp_path, "--quick", "--only", "capabilities", "engine/llama", "engine/sampling", "sleep/level-1"
    )
    assert code == 0 and report["capabilities"]["async_output"]["value"] is False


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_whole_suite_passes(mode: str, npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAKE_NPU_MODE", mode)
    code, report = conformance(tmp_path)
    assert (code, outcomes(report, "fail"), outcomes(report, "error")) == (0, [], [])
    long = (
        "processes/core-dies",
        "processes/server",
        "ranks/communicator",
        "ranks/exchange",
        "ranks/llama",
        "ranks/qwen3-moe",
        "ranks/stages",
    )
    assert set(long) <= set(outcomes(report, "pass"))


@pytest.mark.parametrize(
    "decoder",
    [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.exhaustive)
        for name in COMMON
        # A model with encoders has its decoder's config within, so that a tiny one is made under the decoder's own name.
        if not name.endswith("ForConditionalGeneration") and name not in CONFIGS
    ],
    indirect=True,
)
def test_an_architecture_gives_the_tokens_that_it_gives_on_the_cpu(decoder: str, npu: None, tmp_path: Path) -> None:
    check_tokens(make_tiny_model(decoder, tmp_path, tokenizer=False))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if "num_mel_bins" not in config])
def test_a_decoder_that_reads_an_encoders_text_gives_the_tokens_that_it_gives_on_the_cpu(
    name: str, npu: None, tmp_path: Path
) -> None:
    check_tokens(make_tiny_encoder_decoder(name, tmp_path))


def check_tokens(path: Path) -> None:
    answers: list[Any] = []
    for device in ("cpu", "npu"):
        llm = LLM(str(path), device=device, **SETTINGS)
        answers.append(ask(llm, prompts_of((5, 30, 1, 17)), max_tokens=8))
        llm.shutdown()
    told = compare(answers[1], answers[0], 2e-3)
    assert told.startswith("32 of 32 tokens compared and equal")


def assignments(tree: ast.Module) -> list[str]:
    """Statements that change something of Quire's: assignments to, and deletions of, attributes of what was imported from it;
    and `setattr`, `delattr` and `mock` in any form."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).startswith("quire")
        and not (getattr(node, "module", None) or alias.name).startswith("quire_fake_npu")
    }
    found: list[str] = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in imported:
                found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "delattr", "patch"):
            found.append(ast.unparse(node))
    return found


def test_the_package_patches_nothing(npu_site: Path) -> None:
    (about,) = distributions(path=[str(npu_site)])
    assert {point.group for point in about.entry_points} == {"quire.platform_plugins"}
    sources = sorted(fake_npu.SOURCES.glob("*.py"))
    assert len(sources) >= 7
    assert [found for path in sources for found in assignments(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize(
    "text",
    [
        "from quire.worker import worker\nworker.Worker = None",
        "from quire.worker.worker import Worker\nWorker.load_model.x = None",
        "import quire.kernels\nquire.kernels.ops.linear = 1",
        "from quire.platforms import BUILT_IN\nBUILT_IN['npu'] = 'x'",
        "import quire.x as y\ndel y.z",
        "import quire\nsetattr(quire, 'LLM', None)",
        "from unittest import mock\nmock.patch('quire.LLM')",
    ],
)
def test_a_patch_would_be_found(text: str) -> None:
    assert len(assignments(ast.parse(text))) == 1


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_tier_gives_pages_back_to_the_device(
    mode: str, npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_FAKE_NPU_MODE", mode)
    path, answers = make_tiny_model("LlamaForCausalLM", tmp_path / "model", tokenizer=False), []
    transfer = {"kv_connector": "disk", "kv_connector_extra_config": {"path": str(tmp_path / "kv")}}
    for _ in range(2):
        llm = LLM(str(path), device="npu", kv_transfer_config=transfer, **SETTINGS)
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [3 + i * i % 300 for i in range(50)]}, params, use_tqdm=False)
        answers.append((list(output.outputs[0].token_ids), output.num_cached_tokens))
        llm.shutdown()
    assert answers[0][0] == answers[1][0] and [cached for _, cached in answers] == [0, 48]
