"""Settings of reasoning are read as vLLM writes them."""

from typing import Any

import pytest

from quire.config.reasoning import ReasoningConfig, read_reasoning_config
from quire.engine.arg_parser import ArgumentParser
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError


def parse(*flags: str) -> ReasoningConfig:
    parser = EngineArgs.add_cli_args(ArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args([*flags])).create_engine_config().reasoning


def test_flags_name_the_format_and_its_strings() -> None:
    assert parse() == ReasoningConfig()
    assert parse("--reasoning-config.reasoning_parser", "qwen3") == ReasoningConfig("qwen3")
    given = '{"reasoning_start_str": "<think>", "reasoning_end_str": "Enough.</think>"}'
    assert parse("--reasoning-config", given) == ReasoningConfig("", "<think>", "Enough.</think>")


@pytest.mark.parametrize(
    ("given", "words"),
    [({"reasoning_paser": "qwen3"}, "did you mean 'reasoning_parser'"), ({"reasoning_end_str": 1}, "must be a string")],
)
def test_wrong_settings_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_reasoning_config(given)
