"""The kernel equals its reference, and it is the one that an engine chooses."""

import torch

from quire import LLM, SamplingParams
from quire.kernels import ops
from quire.kernels.registry import explain, reference
from quire.plugins import load_general_plugins


def test_it_equals_its_reference() -> None:
    load_general_plugins("worker")  # as a worker does: the kernel is registered as the plugin's
    from quire_fir.kernels import rms_norm

    for residual in (None, torch.randn(5, 32)):
        x, weight, outs = torch.randn(5, 32), torch.randn(32), (torch.empty(5, 32), torch.empty(5, 32))
        rests = [None if residual is None else residual.clone() for _ in outs]
        rms_norm(x, weight, 1e-5, outs[0], rests[0])
        reference(ops.rms_norm)(x, weight, 1e-5, outs[1], rests[1])
        torch.testing.assert_close(*outs)
        if residual is not None:
            torch.testing.assert_close(*rests)


def test_an_engine_chooses_it() -> None:
    llm = LLM(max_model_len=512)
    chosen = explain()["rms_norm"]
    assert chosen["function"] == "quire_fir.kernels.rms_norm" and chosen["owner"].startswith("fir (")
    answer = llm.chat([{"role": "user", "content": "What is 17 + 25?"}], SamplingParams(temperature=0, max_tokens=20))
    assert answer[0].outputs[0].text == "17 + 25 = 42"
