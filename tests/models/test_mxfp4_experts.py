"""gpt-oss as published, with experts in blocks of 4-bit floats: it computes what their values in a plain checkpoint give."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_parity import TOLERANCE, oracle_logprobs
from tests.oracles.model_driver import ModelDriver, Sequence
from tests.oracles.quantized_models import mxfp4_values, pairs
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.model_loader import load_model
from quire.platforms.cpu import CpuPlatform

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7, 61, 8, 30]
SECTION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same values twice: (in blocks, plain)."""
    plain, blocks = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("blocks")
    make_tiny_model(
        "GptOssForCausalLM", plain, num_local_experts=5, num_experts_per_tok=2, head_dim=16,
        intermediate_size=128, tokenizer=False,
    )  # fmt: skip
    values, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in values.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        matrices_ENK = tensor.transpose(1, 2)
        each = [mxfp4_values(matrix_NK.numpy()) for matrix_NK in matrices_ENK]
        codes_EN = torch.stack([pairs(codes) for codes, _, _ in each])
        stored[f"{name}_blocks"] = codes_EN.unflatten(-1, (-1, 16)).contiguous()
        stored[f"{name}_scales"] = torch.stack([torch.from_numpy(exponents) for _, exponents, _ in each])
        worth = torch.stack([torch.from_numpy(worth) for _, _, worth in each])
        values[name] = worth.transpose(1, 2).contiguous()
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, blocks / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (blocks / "config.json").write_text(json.dumps(config | {"quantization_config": SECTION}))
    if (plain / "generation_config.json").exists():
        shutil.copy(plain / "generation_config.json", blocks)
    return blocks, plain


def load(path, size: int = 1, rank: int = 0, whole: bool = False):
    platform = CpuPlatform()
    platform.select_kernels(deterministic=True)  # inputs as they are: the faster kernels round them to int8
    config = EngineArgs(model=str(path), dtype="float32", skip_tokenizer_init=True).create_engine_config()
    parallel = dataclasses.replace(config.parallel, tensor_parallel_size=size, rank=rank, enable_expert_parallel=whole)
    config = dataclasses.replace(config, parallel=parallel)
    return load_model(config, platform, torch.device("cpu"), 64, 16).model


def test_blocks_give_what_their_values_give(checkpoints):
    blocks, plain = checkpoints
    logprobs = ModelDriver(load(blocks)).prefill(Sequence(list(TOKENS), row=0), chunk=6)
    torch.testing.assert_close(logprobs, oracle_logprobs(plain, tuple(TOKENS)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("whole", [False, True])
def test_the_shares_of_two_ranks_add_up_to_the_whole(whole, checkpoints):
    blocks, plain = checkpoints
    x_TD = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    outs = []
    for model in (load(plain), *(load(blocks, 2, rank, whole) for rank in range(2))):
        outs.append(torch.empty_like(x_TD))
        model._layers[0].mlp.mixture.run(x_TD, outs[-1], torch.tensor([9]), model.workspace.tokens(9))
    torch.testing.assert_close(outs[1] + outs[2], outs[0], rtol=1e-4, atol=1e-5)
    assert outs[1].abs().max() > 0.1 * outs[0].abs().max()
