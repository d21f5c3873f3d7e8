"""Settings of structured outputs are read as vLLM writes them."""

from typing import Any

import pytest

from quire.config.observability import StructuredOutputsConfig, read_structured_outputs_config
from quire.engine.arg_parser import ArgumentParser
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError


def parse(*flags: str) -> StructuredOutputsConfig:
    parser = EngineArgs.add_cli_args(ArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args([*flags])).create_engine_config().structured_outputs


def test_flags_of_old_and_new_name_a_backend() -> None:
    assert parse() == StructuredOutputsConfig()
    assert parse("--structured-outputs-config.backend", "guidance").backend == "guidance"
    assert parse("--guided-decoding-backend", "guidance").backend == "guidance"
    config = parse("--structured-outputs-config", '{"disable_any_whitespace": true, "enable_in_reasoning": true}')
    assert config == StructuredOutputsConfig(disable_any_whitespace=True, enable_in_reasoning=True)


@pytest.mark.parametrize(
    ("given", "old", "words"),
    [
        ({"backend": "lark"}, None, "auto, xgrammar, guidance"),
        ({"backned": "auto"}, None, "'backned'"),
        ({"disable_any_whitespace": "yes"}, None, "must be True or False"),
        (None, "lark", "guided_decoding_backend"),
    ],
)
def test_wrong_settings_are_refused(given: Any, old: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_structured_outputs_config(given, old)


def test_a_backend_that_is_not_installed_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"-m pip install 'xgrammar>=0.2'"):
        read_structured_outputs_config({"backend": "xgrammar"})
