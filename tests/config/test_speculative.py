"""`speculative_config` and its shorter spellings: what is read, and what is refused."""

from typing import Any

import pytest

from quire.config.speculative import DEFAULT_TOKENS, SpeculativeConfig, read_speculative_config
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError


def test_nothing_asked_for_is_nothing() -> None:
    assert read_speculative_config(None) is read_speculative_config({}) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", SpeculativeConfig(method="auto")),
        ({"method": "ngram", "num_speculative_tokens": 5, "model": None}, SpeculativeConfig(num_speculative_tokens=5)),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 12, "suffix_decoding_min_token_prob": 0.3},
            SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=12, suffix_decoding_min_token_prob=0.3),
        ),
        ({"rejection_sample_method": "rejection"}, SpeculativeConfig(rejection_sample_method="rejection")),
        ({"model": "ngram", "prompt_lookup_max": 4}, SpeculativeConfig(model="ngram", prompt_lookup_max=4)),
    ],
)
def test_the_object_is_vllms(given: Any, expected: SpeculativeConfig) -> None:
    assert read_speculative_config(given) == expected


def test_the_short_spellings_are_keys_of_the_object() -> None:
    args = EngineArgs(spec_method="ngram", spec_tokens=3)
    config = read_speculative_config(args.speculative_config, args.spec_method, args.spec_model, args.spec_tokens)
    assert config == SpeculativeConfig(num_speculative_tokens=3)
    with pytest.raises(
        ConfigError, match=r"spec_tokens=3 and speculative_config\.num_speculative_tokens=4 are one setting"
    ):
        read_speculative_config({"num_speculative_tokens": 4}, tokens=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "eagle", "model": "x", "speculative_token_tree": "[(0,)]"},
            "speculative_token_tree.*guesses form a chain",
        ),
        ({"method": "eagle", "model": "x", "use_heterogeneous_vocab": True}, "method 'eagle' has the model's tokens"),
        ({"method": "ngramm"}, "speculative_config.method='ngramm' is not valid.*did you mean 'ngram'"),
        ({"methods": "ngram"}, "speculative_config has 'methods', which is not known"),
        (
            {"method": "dflash", "model": "x"},
            "speculative_config.method='dflash' cannot be used: it is not available yet",
        ),
        ({"method": "ngram", "model": "meta/x"}, "method 'ngram' has no model"),
        ({"prompt_lookup_min": 9, "prompt_lookup_max": 3}, "prompt_lookup_min=9 cannot be used.*prompt_lookup_max=3"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 is not valid"),
        ({"rejection_sample_method": "synthetic"}, "it needs synthetic_acceptance_rate or"),
        ({"synthetic_acceptance_rate": 0.5}, "only rejection_sample_method='synthetic' reads them"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6]},
            "none above the one before",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_speculative_config(given)
    assert error.value.setting == "speculative_config"


def test_synthetic_rates_are_of_a_guess_whose_predecessors_were_accepted() -> None:
    by_position = SpeculativeConfig(
        num_speculative_tokens=4, rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.8, 0.4, 0.0]
    )
    assert by_position.synthetic_rates() == [0.8, 0.5, 0.0, 0.0]
    rate = SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_rate=0.7)
    assert rate.synthetic_rates() == [0.7] * DEFAULT_TOKENS
    assert rate.drafts_of_step(2) == 2 * DEFAULT_TOKENS and rate.drafts_of_step(1000) == 512
