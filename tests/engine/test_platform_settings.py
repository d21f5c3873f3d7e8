"""A platform's word on settings: defaults for what the user left open, rules for all, and who set what."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError, Explained
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import Capabilities, SettingRule


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model's description."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 99, "hidden_size": 32}))
    return tmp_path


def configure(model: Path, **settings: Any) -> Any:
    return EngineArgs(model=str(model), device="cpu", skip_tokenizer_init=True, **settings).create_engine_config()


def with_rules(monkeypatch: pytest.MonkeyPatch, *rules: SettingRule) -> None:
    monkeypatch.setattr(CpuPlatform, "setting_rules", lambda self: rules)


def test_settings_that_the_user_gave_are_the_users_and_others_are_nobodys(llama: Path) -> None:
    config = configure(llama, max_num_seqs=7)
    assert config.set_by == {"model": "user", "device": "user", "skip_tokenizer_init": "user", "max_num_seqs": "user"}


def test_a_platform_gives_defaults_by_the_model_and_the_user_has_the_last_word(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def defaults(self: CpuPlatform, hf_config: Any) -> dict[str, Any]:
        seen.append(hf_config.get("model_type"))
        return {"max_num_seqs": 3, "block_size": 32}

    monkeypatch.setattr(CpuPlatform, "setting_defaults", defaults)
    config = configure(llama, block_size=64)
    assert seen == ["llama"]
    assert (config.scheduler.max_num_seqs, config.cache.block_size) == (3, 64)
    assert (config.set_by["max_num_seqs"], config.set_by["block_size"]) == ("platform cpu", "user")


def test_a_default_of_a_platform_is_checked_as_a_users_value_is(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "setting_defaults", lambda self, hf_config: {"max_num_seqs": -1})
    with pytest.raises(ConfigError, match="max_num_seqs"):
        configure(llama)
    monkeypatch.setattr(CpuPlatform, "setting_defaults", lambda self, hf_config: {"max_num_seq": 1})
    with pytest.raises(ConfigError, match=r"'max_num_seq' that there is not .did you mean 'max_num_seqs'"):
        configure(llama)


def test_a_rule_refuses_a_value_with_its_reason(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rules(monkeypatch, SettingRule("kv_cache_dtype", ("auto", "float32"), "pages are 32 bits wide"))
    assert configure(llama, kv_cache_dtype="float32").cache.cache_dtype == "float32"
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype='bfloat16' .*pages are 32 bits wide.*'auto', 'float32'"
    ) as seen:
        configure(llama, kv_cache_dtype="bfloat16")
    assert seen.value.setting == "kv_cache_dtype"


def test_a_rule_resets_a_value_and_says_so(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_rules(monkeypatch, SettingRule("enforce_eager", (True,), "nothing is recorded here", reset_to=(True,)))
    with caplog.at_level(logging.WARNING):
        config = configure(llama)
    assert config.model.enforce_eager and config.set_by["enforce_eager"] == "platform cpu"


@pytest.mark.parametrize(
    ("capability", "settings"),
    [
        ("tensor_parallel", {"tensor_parallel_size": 2}),
        ("expert_parallel", {"enable_expert_parallel": True}),
        ("token_exchange", {"all2all_backend": "all_to_all", "enable_expert_parallel": True}),
    ],
)
def test_ranks_that_a_platform_does_not_claim_are_refused_with_its_reason(
    capability: str, settings: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert configure(llama, **settings)
    usual = CpuPlatform.capabilities

    def capabilities(self: CpuPlatform) -> Capabilities:
        return dataclasses.replace(usual(self), **{capability: Explained(False, "one device stands alone")})

    monkeypatch.setattr(CpuPlatform, "capabilities", capabilities)
    with pytest.raises(ConfigError, match="one device stands alone"):
        configure(llama, **settings)


def test_more_ranks_than_devices_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "device_count", lambda self: 3)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4, but the cpu platform sees 3 devices"):
        configure(llama, tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "set enable_expert_parallel"),
        ({"enable_expert_parallel": True, "enable_lora": True}, "leave enable_lora out"),
    ],
)
def test_tokens_go_to_whole_experts_without_adapters(settings: dict[str, Any], why: str, llama: Path) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        configure(llama, all2all_backend="all_to_all", **settings)
    assert refused.value.setting == "all2all_backend"
