"""The format is known by its name, and a model in it still answers."""

import torch
from quire_cedar import round_weight

from quire import LLM, SamplingParams
from quire.kernels.packed import dequantize
from quire.kernels.types import PackedWeight


def test_a_weight_is_near_what_it_was() -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    rounded = round_weight(weight, None, torch.float32)
    assert isinstance(rounded, PackedWeight)
    assert (dequantize(rounded) - weight).abs().max() < weight.abs().max() / 127


def test_a_model_in_the_format_answers() -> None:
    llm = LLM(quantization="cedar", max_model_len=512)
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=20))
    assert answer[0].outputs[0].text == "17 + 25 = 42"
    [explained] = llm.collective_rpc("explain")
    assert explained["attention_backend"]["model"]["quantization"] == "cedar"
