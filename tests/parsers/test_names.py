"""Every name of a parser that vLLM 0.33 has is known, for `--tool-call-parser` and for `--reasoning-parser`."""

import pytest

from quire.errors import ConfigError
from quire.parsers.choice import choose_formats

CALLS = [
    "apertus",
    "beam",
    "cohere_command3",
    "cohere_command4",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "dots",
    "ernie45",
    "functiongemma",
    "gemma4",
    "gigachat3",
    "glm45",
    "glm47",
    "granite",
    "granite-20b-fc",
    "granite4",
    "hermes",
    "hf",
    "hunyuan_a13b",
    "hy_v3",
    "hy_v4",
    "inkling",
    "internlm",
    "jamba",
    "k2_horizon",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "ling3",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "longcat",
    "mimo",
    "minicpm5",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "muse",
    "muse_glimmer",
    "musespark1x",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "plamo3",
    "poolside_v1",
    "pythonic",
    "qwen3_coder",
    "qwen3_json",
    "qwen3_xml",
    "seed_oss",
    "step3",
    "step3p5",
    "step5",
    "xlam",
]
THOUGHTS = [
    "beam",
    "cohere_command3",
    "cohere_command4",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "deepseek_v41",
    "ernie45",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "granite_thinking_parser",
    "hf",
    "holo2",
    "hunyuan_a13b",
    "hy_v3",
    "hy_v4",
    "inkling",
    "k2_horizon",
    "kimi_k2",
    "kimi_k3",
    "ling3",
    "mimo",
    "minicpmv",
    "minimax_m2",
    "minimax_m2_append_think",
    "minimax_m3",
    "mistral",
    "muse",
    "muse_glimmer",
    "musespark1x",
    "nemotron_v3",
    "olmo3",
    "openai_gptoss",
    "plamo3",
    "poolside_v1",
    "qwen3",
    "seed_oss",
    "step3",
    "step3p5",
    "step5",
]


BY_TEMPLATE = ("beam", "hf")
"""A checkpoint's own template of answers says how these are written."""


@pytest.mark.parametrize("name", CALLS)
def test_every_name_of_calls_is_known(name: str) -> None:
    found = choose_formats("none", name, None)
    assert found.tools is not None or found.is_harmony or name in BY_TEMPLATE


@pytest.mark.parametrize("name", THOUGHTS)
def test_every_name_of_reasoning_is_known(name: str) -> None:
    found = choose_formats(name, "none", None)
    assert found.reasoning is not None or found.is_harmony or name in BY_TEMPLATE


def test_another_name_is_refused_with_those_that_there_are() -> None:
    for names in (("none", "hermess"), ("hermess", "none")):
        with pytest.raises(ConfigError, match="hermess"):
            choose_formats(*names, None)
