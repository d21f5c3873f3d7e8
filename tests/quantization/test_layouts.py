"""Matrices of other shapes and names than a Llama's, in the formats whose packing makes them hard to take apart."""

import dataclasses
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.quantized_models import MATRICES, WEIGHT_ONLY, store
from tests.oracles.quantized_variants import VARIANTS
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.model_loader import load_model
from quire.platforms.cpu import CpuPlatform

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]
FORMATS = WEIGHT_ONLY | VARIANTS
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "rows of two kinds in one word": ("Qwen3NextForCausalLM", {}, "awq", r"in_proj_ba\.weight$"),
    "an odd number of columns": ("MambaForCausalLM", {"time_step_rank": 7}, "gptq 4 bits", MATRICES),
    "one word a row": ("LlamaForCausalLM", {"intermediate_size": 8}, "gptq 4 bits", MATRICES),
    "experts left in one plain tensor": ("GraniteMoeForCausalLM", {}, "bitsandbytes nf4", MATRICES),
    "blocks under another name": ("BloomForCausalLM", {}, "auto-round gptq", r"h\.\d+\..*(dense|query_key_value)\w*\.weight$"),
}  # fmt: skip


def logprobs_of(path):
    platform = CpuPlatform()
    platform.select_kernels(deterministic=True)
    config = EngineArgs(model=str(path), dtype="float32").create_engine_config()
    loaded = load_model(config, platform, torch.device("cpu"), 64, 16)
    return ModelDriver(loaded.model, pages_a_row=16).prefill(Sequence(list(TOKENS), row=0))


def test_llama4s_experts_may_stand_one_by_one(tmp_path):
    """As tools have them that know linear layers only; rows are outputs then."""
    source = make_tiny_model("Llama4ForCausalLM", tmp_path / "stacked")
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        before, _, kind = name.rpartition(".")
        for number, matrix in enumerate(tensors.pop(name)):
            parts = {"gate_proj": matrix.T.chunk(2)[0], "up_proj": matrix.T.chunk(2)[1]}
            for part, values in (parts if kind == "gate_up_proj" else {"down_proj": matrix.T}).items():
                tensors[f"{before}.{number}.{part}.weight"] = values.contiguous()
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    save_file(tensors, plain / "model.safetensors")
    torch.testing.assert_close(logprobs_of(plain), logprobs_of(source), rtol=0, atol=1e-4)
    store(plain, tmp_path, FORMATS["compressed 4 bits"])
    torch.testing.assert_close(logprobs_of(tmp_path), logprobs_of(tmp_path / "worth"), rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_worth_its_values(tmp_path, case):
    architecture, settings, name, matrices = CASES[case]
    form = FORMATS[name]
    if "block_name_to_quantize" in form.section:
        form = dataclasses.replace(form, section=form.section | {"block_name_to_quantize": "transformer.h"})
    source = make_tiny_model(architecture, tmp_path / "plain", **settings)
    store(source, tmp_path, form, matrices=matrices)
    torch.testing.assert_close(logprobs_of(tmp_path), logprobs_of(tmp_path / "worth"), rtol=0, atol=1e-3)
