"""`tools/record_kernels.py`: a start's kernels are named on a machine that has no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels.triton.runtime import places

TOOL = Path(__file__).resolve().parent.parent.parent.parent / "tools" / "record_kernels.py"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton would look for the machine's own GPU")
def test_a_start_is_gone_through_without_a_gpu(tmp_path):
    model = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 3000,
        "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "torch_dtype": "bfloat16", "tie_word_embeddings": True, "attention_bias": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    command = [
        sys.executable,
        str(TOOL),
        str(tmp_path),
        "--output",
        str(tmp_path / "lists"),
        "--set",
        "max_num_seqs=64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "lists").iterdir()
    assert file.name.startswith("Qwen3ForCausalLM-bfloat16-sm90-")
    variants = places.read_list(file)
    modules = {variant["kernel"].partition(":")[0] for variant in variants}
    assert {
        "quire.kernels.triton.norm.norms",
        "quire.kernels.triton.attention.decode_kernel",
        "quire.kernels.triton.sampling.draw",
    } <= modules
    assert any(variant["options"].get("launch_pdl") for variant in variants)
    assert len({places.identity(variant) for variant in variants}) == len(variants) > 20
