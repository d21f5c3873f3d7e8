"""Kinds of adapters beside LoRA: (IA)3 against PEFT, control vectors against Transformers; in batches that mix kinds."""

from pathlib import Path
from typing import Any

import gguf
import peft
import pytest
import torch
from safetensors.torch import save_file
from tests.lora.conftest import PROMPTS, TOLERANCE, assert_parity, request, run, worst_difference
from tests.oracles.peft_adapters import PeftOracle, make_adapter, randomize
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "enable_lora": True, "max_model_len": 64, "max_num_seqs": 16, "max_logprobs": -1}


def make_ia3(base: Path, path: Path, seed: int, targets: list[str], feedforward: list[str]) -> Path:
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=feedforward)
    model = peft.get_peft_model(load_oracle(base), config)
    randomize(model, seed, 0.6)
    model.save_pretrained(str(path))
    return path


class SteeredOracle(PeftOracle):
    """A checkpoint some of whose layers' outputs get a vector."""

    def __init__(self, base: Path, vectors: dict[int, torch.Tensor]) -> None:
        super().__init__(base)
        for number, vector in vectors.items():
            self.model.model.layers[number].register_forward_hook(lambda module, given, out, v=vector: out + v)


@pytest.mark.parametrize(
    ("architecture", "targets", "feedforward"),
    [
        ("LlamaForCausalLM", ["k_proj", "v_proj", "down_proj"], ["down_proj"]),
        ("Qwen2ForCausalLM", ["q_proj", "up_proj", "o_proj", "down_proj"], ["o_proj"]),
        ("GPT2LMHeadModel", ["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    ],
)
def test_ia3_multiplies_what_matrices_give_or_read_as_peft_does(
    architecture: str, targets: list[str], feedforward: list[str], tmp_path: Path
):
    base = make_tiny_model(architecture, tmp_path / "base")
    scaled = make_ia3(base, tmp_path / "ia3", 1, targets, feedforward)
    lora = make_adapter(base, tmp_path / "lora", 2, r=4, target_modules=targets)
    assert_parity(LLM(str(base), **SETTINGS), base, [None, scaled, lora], prompts=PROMPTS[:2], max_tokens=4)


def test_inputs_that_several_matrices_share_cannot_be_multiplied_for_one(tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base")
    path = make_ia3(base, tmp_path / "ia3", 1, ["q_proj"], ["q_proj"])
    given: Any = {"prompt_token_ids": PROMPTS[0]}
    (output,) = LLM(str(base), **SETTINGS).generate(
        given, SamplingParams(max_tokens=1), use_tqdm=False, lora_request=request(path)
    )
    assert "layers.0.self_attn.q_proj shares its input" in str(output.error)


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "folder"])
def test_a_control_vector_is_added_behind_its_layers(kind: str, tmp_path: Path):
    base = make_tiny_model("LlamaForCausalLM", tmp_path / "base")
    generator = torch.Generator().manual_seed(3)
    vectors = {number: torch.randn(64, generator=generator) for number in (1, 2)}
    named, path, scale = {f"direction.{n}": v for n, v in vectors.items()}, tmp_path / f"steer.{kind}", 1.0
    if kind == "gguf":
        writer = gguf.GGUFWriter(str(path), "controlvector")
        for name, vector in named.items():
            writer.add_tensor(name, vector.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    elif kind == "safetensors":
        save_file(named, path)
    else:
        path.mkdir()
        save_file(named, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text('{"peft_type": "CONTROL_VECTOR", "scale": -0.5}')
        scale = -0.5
    lora = make_adapter(base, tmp_path / "lora", 2, r=4, target_modules="all-linear")
    outputs = run(LLM(str(base), **SETTINGS), [PROMPTS[0]] * 3, [request(path, 1), None, request(lora, 2)], 4)
    steered = SteeredOracle(base, {number: scale * vector for number, vector in vectors.items()})
    for output, oracle in zip(outputs, (steered, PeftOracle(base), PeftOracle(base, lora)), strict=True):
        assert worst_difference(output, oracle) < TOLERANCE
