"""Every linear module of every architecture: an adapter on it gives what PEFT gives, or is refused by the module's name."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.lora.conftest import TOLERANCE, request, worst_difference
from tests.oracles.peft_adapters import PeftOracle, randomize
from tests.oracles.tiny_mixtures import MIXTURES, RECURRENT
from tests.oracles.tiny_models import _DEFAULTS, make_tiny_model
from transformers.pytorch_utils import Conv1D

from quire import LLM, SamplingParams

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 200, 17, 90, 33, 5, 5, 61]
_LAYERS = "model.layers.*"
_SHARED = f"{_LAYERS}.shared_transformer"
REFUSED: dict[str, set[str]] = {
    # Each group of heads has rows of its own.
    "DeepseekV4ForCausalLM": {f"{_LAYERS}.self_attn.o_a_proj"},
    # Two parameters of one shape, which an adapter's file does not tell apart.
    "InklingForCausalLM": {f"{_LAYERS}.mlp.shared_experts:{name}" for name in ("gate_proj", "up_proj")},
    # Some of the experts have no matrices.
    "LongcatFlashForCausalLM": {f"{_LAYERS}.mlp.experts:gate_up_proj"},
    # The weights are another layer's.
    "Zamba2ForCausalLM": {
        *(f"{_SHARED}.self_attn.{name}_proj" for name in "qkvo"),
        *(f"{_SHARED}.feed_forward.{name}" for name in ("gate_up_proj", "down_proj", "gate_up_proj_adapter_list.*.*")),
    },
}
"""By architecture, all kinds of modules that are refused (`*` stands for numbers)."""


def kinds_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Names of linear modules, and of parameters with the matrices of all experts (behind a colon); those that differ in numbers
    alone together."""
    kinds: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and name.endswith("experts"):
                kinds.setdefault(re.sub(r"\d+", "*", f"{name}:{own}"), []).append(f"{name}.{own}")
    return kinds


def adapters_of(base: Path, folder: Path) -> Iterator[tuple[str, Path, PeftOracle]]:
    """For each kind of module an adapter, and what Transformers computes when PEFT has merged it: some of its layers read weights
    past PEFT's modules."""
    oracle = PeftOracle(base)
    plain = oracle.model
    for number, (kind, names) in enumerate(kinds_of(plain).items()):
        targets = {"target_parameters" if ":" in kind else "target_modules": names}
        config = peft.LoraConfig(r=3, lora_alpha=6, **{"target_modules": [], **targets})
        model = peft.get_peft_model(copy.deepcopy(plain), config)
        randomize(model, number, 0.3)
        model.save_pretrained(str(folder / str(number)))
        is_head = kind in ("lm_head", "embed_out")  # whose matrix may be the embeddings too
        oracle.model = model.eval() if is_head else model.merge_and_unload().eval()
        yield kind, folder / str(number), oracle


@pytest.fixture(autouse=True)
def targets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT takes `gate_proj` of a mixture's shared expert for one of the experts', which Transformers has in one parameter."""
    conversion = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
    monkeypatch.setattr(conversion, lambda *args, **kwargs: None)
    monkeypatch.setattr("peft.tuners.tuners_utils.BaseTuner._check_target_module_compatiblity", lambda *args: None)


def check_every_module(architecture: str, tmp_path: Path, **overrides: Any) -> None:
    base = make_tiny_model(architecture, tmp_path / "base", **overrides)
    llm = LLM(
        str(base), dtype="float32", enable_lora=True, max_model_len=64, max_num_seqs=4, max_logprobs=-1, max_loras=2
    )
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=3, ignore_eos=True, logprobs=-1)
    refused, wrong = dict[str, str](), list[str]()
    for number, (kind, path, oracle) in enumerate(adapters_of(base, tmp_path), 1):
        given: Any = {"prompt_token_ids": PROMPT}
        (output,) = llm.generate(given, params, use_tqdm=False, lora_request=request(path, number))
        if output.error is not None:
            refused[kind] = output.error
            assert kind.partition(":")[0] in re.sub(r"\d+", "*", output.error)
        elif (difference := worst_difference(output, oracle)) > TOLERANCE:
            wrong.append(f"{kind} differs by {difference:.4f}")
    assert not wrong
    assert set(refused) == REFUSED.get(architecture, set())


ARCHITECTURES = sorted(
    name
    for name in {**_DEFAULTS, **MIXTURES, **RECURRENT}
    if not name.endswith("ForConditionalGeneration") and hasattr(transformers, name)
)
SOME: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"num_hidden_layers": 2},
    "Qwen3NextForCausalLM": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "MambaForCausalLM": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("architecture", SOME)
def test_an_adapter_on_any_module_gives_what_peft_gives_or_is_refused(architecture: str, tmp_path: Path):
    check_every_module(architecture, tmp_path, **SOME[architecture])


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name.endswith("ForCausalLM")])
def test_every_architecture(architecture: str, tmp_path: Path):
    check_every_module(architecture, tmp_path)
