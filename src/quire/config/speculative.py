"""Speculation: who guesses tokens, how many, and how guesses are verified, as `speculative_config` says.

The keys are vLLM's. Knows no model: whether one can be speculated on is decided where its layers are known.
"""

# ruff: noqa: RUF009  (`setting` makes the field)

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from quire.config.checks import FLAG, TEXT, Check, number, one_of, read_object, setting, whole
from quire.errors import ConfigError
from quire.guards import is_mapping, is_sequence
from quire.logger import init_logger

logger = init_logger(__name__)

MODEL_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator")
"""Methods in which a model of its own guesses, that the workers run."""
PARALLEL_METHODS = ("draft_model", "eagle", "eagle3")
"""Those whose checkpoints may have been trained to make all guesses at once."""
SUFFIX_METHODS = ("auto", "suffix")
"""Methods that go on as any text at hand does."""
METHODS = ("auto", "ngram", "suffix", *MODEL_METHODS)
"""Who can guess."""
NOT_YET = ("dflash", "custom_class")
"""Methods of vLLM that Quire does not have yet."""
NO_EFFECT = (
    "attention_backend",
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
    "disable_padded_drafter_batch",
    "enforce_eager",
    "max_model_len",
    "moe_backend",
    "num_speculative_tokens_per_batch_size",
    "use_local_argmax_reduction",
)
"""Keys of vLLM's for what is measured here: kernels of a drafter, and how many guesses a step's size allows."""
MOST_TOKENS = 64
DEFAULT_TOKENS = 16
"""Guesses for a row and step, where nobody says how many: the cost model uses as many of them as pay."""
DEFAULT_MODEL_TOKENS = 5
"""The same of a model, which takes time for each guess."""
MOST_STEP_TOKENS = 512
"""Guesses of a step: each needs a row of logits."""
RATES = Check(
    "a list of numbers from 0 to 1, none above the one before it",
    lambda value: (
        is_sequence(value)
        and all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in value)
        and all(one >= other for one, other in itertools.pairwise(value))
    ),
)


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How an engine speculates.

    Attributes:
        method: `ngram` continues the latest earlier place of a request's own tokens; `suffix` goes on as most earlier places do,
            of its own tokens and of what other requests have answered; `auto` is the same, and off where the model cannot be
            speculated on. `draft_model`: a smaller model;
            `eagle`, `eagle3`: a head over what the model makes of its tokens; `mtp`: the layer for further tokens in the
            model's own checkpoint; `medusa`, `mlp_speculator`: heads over its last hidden state.
        model: of `MODEL_METHODS`: a folder or a hub id. `revision`, `quantization`: its own, where it is not the target's.
        use_heterogeneous_vocab: a draft model with another tokenizer guesses tokens that both have; False refuses such a model.
        parallel_drafting: a draft model or an EAGLE head that was trained for it makes all guesses at once, over tokens that
            stand for those that are not known yet.
        draft_tensor_parallel_size: 1, or the target's: every rank has the whole drafter.
        num_speculative_tokens: most guesses for a row and step; the cost model uses fewer where more do not pay.
        prompt_lookup_max, prompt_lookup_min: tokens that must have occurred before: at least the second number, and no more than
            the first are compared.
        suffix_decoding_max_tree_depth: tokens that `suffix` compares at most.
        suffix_decoding_max_cached_requests: answers of other requests that it keeps at most; 0: none.
        suffix_decoding_max_spec_factor: guesses for each token that a place has in common with the request's end.
        suffix_decoding_min_token_prob: how likely a guess must be, with all before it, by the share of places that agree.
        rejection_sample_method: `standard` accepts a guess that is what the model draws; `rejection` accepts a guess of a drafter
            with probabilities more often, and its tokens depend on the drafter; `synthetic` accepts guesses at random, to
            measure speed, and gives wrong text.
        draft_sample_method: how a model that guesses draws: None with the noise that the model will draw with at that place;
            `greedy` takes the likeliest token; `probabilistic` draws with noise of its own, and guesses are accepted by
            `rejection`, which means the same for such a method.
        synthetic_acceptance_rate, synthetic_acceptance_rates: how often `synthetic` accepts: a guess whose predecessors were
            accepted; or by position, a guess and all before it.
        enable_adaptive_verification: the cost model decides how many guesses are verified; False verifies all.
    """

    method: str = setting("ngram", one_of(*METHODS, *NOT_YET))
    num_speculative_tokens: int = setting(0, whole(1, MOST_TOKENS))
    model: str | None = setting(None, TEXT)
    revision: str | None = setting(None, TEXT)
    quantization: str | None = setting(None, TEXT)
    use_heterogeneous_vocab: bool | None = setting(None, FLAG)
    parallel_drafting: bool = setting(False, FLAG)
    draft_tensor_parallel_size: int | None = setting(None, whole(1))
    prompt_lookup_max: int = setting(16, whole(1, 256))
    prompt_lookup_min: int = setting(2, whole(1, 256))
    suffix_decoding_max_tree_depth: int = setting(24, whole(2, 256))
    suffix_decoding_max_cached_requests: int = setting(10_000, whole(0))
    suffix_decoding_max_spec_factor: float = setting(1.0, number(0.0, 64.0))
    suffix_decoding_min_token_prob: float = setting(0.1, number(0.0, 1.0))
    rejection_sample_method: str = setting("standard", one_of("standard", "rejection", "synthetic"))
    draft_sample_method: str | None = setting(None, one_of("greedy", "probabilistic"))
    synthetic_acceptance_rate: float | None = setting(None, number(0.0, 1.0))
    synthetic_acceptance_rates: list[float] | None = setting(None, RATES)
    enable_adaptive_verification: bool = setting(True, FLAG)

    def __post_init__(self) -> None:
        for is_wrong, key, why in self._rules():
            if is_wrong:
                _refuse(key, getattr(self, key), why)
        if not self.num_speculative_tokens:
            object.__setattr__(
                self, "num_speculative_tokens", DEFAULT_MODEL_TOKENS if self.has_model else DEFAULT_TOKENS
            )

    def _rules(self) -> list[tuple[bool, str, str]]:
        """What may be wrong: whether it is, with which key, and why."""
        method, has_model, by = f"method {self.method!r}", self.has_model, self.rejection_sample_method
        rate, rates = self.synthetic_acceptance_rate is not None, self.synthetic_acceptance_rates is not None
        names_model = self.model is not None and self.model not in METHODS
        foreign = bool(self.use_heterogeneous_vocab) and self.method != "draft_model"
        parallel = self.parallel_drafting and self.method not in PARALLEL_METHODS
        is_greedy = self.draft_sample_method == "greedy" and by == "rejection"
        of_models = ("revision", "quantization", "draft_tensor_parallel_size", "draft_sample_method")
        needs_rate = "it needs synthetic_acceptance_rate or synthetic_acceptance_rates"
        no_reader = "only rejection_sample_method='synthetic' reads them"
        few, most = self.prompt_lookup_min, self.prompt_lookup_max
        return [
            (self.method in NOT_YET, "method", f"it is not available yet in Quire; there are {', '.join(METHODS)}"),
            (foreign, "use_heterogeneous_vocab", f"{method} has the model's tokens"),
            (parallel, "parallel_drafting", f"{method} has none; {', '.join(PARALLEL_METHODS)} have"),
            (
                has_model and not self.model and self.method != "mtp",
                "model",
                f"{method} needs one: a folder or a hub id",
            ),
            (has_model and self.is_synthetic, "rejection_sample_method", f"{method} accepts by what is drawn"),
            (
                has_model and is_greedy,
                "draft_sample_method",
                f"rejection_sample_method={by!r} needs guesses that are drawn",
            ),
            (not has_model and names_model, "model", f"{method} has no model"),
            *((not has_model and getattr(self, key) is not None, key, f"{method} has no model") for key in of_models),
            (few > most, "prompt_lookup_min", f"it is above prompt_lookup_max={most}"),
            (self.is_synthetic and rate == rates, "rejection_sample_method", needs_rate),
            (rate and not self.is_synthetic, "synthetic_acceptance_rate", no_reader),
            (rates and not self.is_synthetic, "synthetic_acceptance_rates", no_reader),
        ]

    @property
    def has_model(self) -> bool:
        """Whether a model guesses."""
        return self.method in MODEL_METHODS

    @property
    def is_synthetic(self) -> bool:
        """Whether guesses are accepted at random."""
        return self.rejection_sample_method == "synthetic"

    @property
    def is_probabilistic(self) -> bool:
        """Whether guesses are accepted by what they were drawn from, as far as that is known."""
        return self.rejection_sample_method == "rejection" or self.draft_sample_method == "probabilistic"

    def drafts_of_step(self, max_num_seqs: int) -> int:
        """Guesses that one step verifies at most."""
        return min(self.num_speculative_tokens * max_num_seqs, MOST_STEP_TOKENS)

    def synthetic_rates(self) -> list[float]:
        """How often `synthetic` accepts the guess at each position, if those before it were accepted."""
        rates, count = self.synthetic_acceptance_rates, self.num_speculative_tokens
        if rates is None:
            return [self.synthetic_acceptance_rate or 0.0] * count
        before = [1.0, *rates]
        each = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
        return [*each, *[0.0] * count][:count]


def _refuse(key: str, value: Any, why: str) -> None:
    raise ConfigError(f"speculative_config.{key}={value!r} cannot be used: {why}", setting="speculative_config")


def read_speculative_config(
    given: Mapping[str, Any] | str | None,
    method: str | None = None,
    model: str | None = None,
    tokens: int | None = None,
) -> SpeculativeConfig | None:
    """What `speculative_config` says, or the shorter `spec_method`, `spec_model` and `spec_tokens`; None where none is given.

    Raises:
        ConfigError: a key or a value is not known, or two settings disagree.
    """
    values: dict[str, Any] = {}
    if isinstance(given, str):
        values["method"] = given
    elif is_mapping(given):
        values = {str(key): value for key, value in given.items() if value is not None}
    for setting_name, key, value in (
        ("spec_method", "method", method),
        ("spec_model", "model", model),
        ("spec_tokens", "num_speculative_tokens", tokens),
    ):
        if value is not None and values.setdefault(key, value) != value:
            message = f"{setting_name}={value!r} and speculative_config.{key}={values[key]!r} are one setting: give one of them"
            raise ConfigError(message, setting=setting_name)
    if not values:
        return None
    if (tree := values.get("speculative_token_tree")) is not None:
        why = "guesses form a chain, one behind the other: leave it out (docs/speculative_decoding.md says why)"
        _refuse("speculative_token_tree", tree, why)
    if str(values.get("method")).endswith("_mtp"):  # vLLM's older names, one a family
        values["method"] = "mtp"
    for key in sorted(values.keys() & set(NO_EFFECT)):
        logger.info("speculative_config.%s has no effect (%r): it is chosen by what is measured", key, values.pop(key))
    if "method" not in values and "model" in values:  # vLLM's older spelling of the n-gram method, or a draft model
        values["method"] = values["model"] if values["model"] in METHODS else "draft_model"
    return read_object(SpeculativeConfig, "speculative_config", values)
