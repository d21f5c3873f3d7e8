"""How to sample: one request's parameters, checked when they are made.

Knows ranges. Knows nothing of tensors, tokenizers or the model: the input processor checks what depends on those.
"""

import copy
import enum
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import msgspec

from quire import param_checks as checks
from quire.config import limits
from quire.errors import RequestError, refusing
from quire.guards import is_dict, is_mapping, is_sequence

GREEDY_BELOW = 1e-5
"""Temperatures under this mean greedy."""
LEAST_TEMPERATURE = 0.01
"""Temperatures above greedy and under this are raised to it: logits divided by less overflow half precision."""
MOST_TEMPERATURE = 2.0
_INT32_MAX = (1 << 31) - 1
_INT64 = 1 << 63
_MOST_LOGITS_PROCESSORS = 64
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class RequestOutputKind(enum.IntEnum):
    """What each output of a request carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(enum.IntEnum):
    """How tokens are chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class StructuredOutputsParams(
    msgspec.Struct, metaclass=checks.ParamsMeta, omit_defaults=True, forbid_unknown_fields=True
):
    """A constraint on the output: exactly one of the first six fields."""

    json: str | bool | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{', '.join(given)} are given" if given else "none is given"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(_CONSTRAINTS)}; {found}",
                param="structured_outputs",
            )
        checks.apply(_STRUCTURED_OUTPUTS_CHECKS, self)

    def constraint(self) -> tuple[str, Any]:
        """The field that is set and its value, for example `("regex", "a+")`."""
        return next((name, value) for name in _CONSTRAINTS if (value := getattr(self, name)) is not None)


_JSON_VALUES = {"json": "a JSON schema", "structural_tag": "a structural tag"}


def _check_json(name: str, value: Any) -> Any:
    """A JSON object (or the schema `true`), or text that holds one."""
    if isinstance(value, str):
        _check_json_text(name, checks.text(name, value, limits.MAX_GRAMMAR_BYTES))
    else:
        _check_json_value(name, value)
    return value


@functools.lru_cache(maxsize=16)  # requests of one batch often have the same schema
def _check_json_text(name: str, text: str) -> None:
    with refusing(ValueError, RecursionError, param=name, what=f"structured_outputs.{name} is not valid JSON"):
        value = json.loads(text)
    _check_json_value(name, value)


def _check_json_value(name: str, value: Any) -> None:
    if not is_dict(value) and not (name == "json" and isinstance(value, bool)):
        checks.refuse(name, value, f"{_JSON_VALUES[name]}: an object, or text that holds one")
    _check_depth(name, value, limits.MAX_JSON_DEPTH)


def _check_depth(name: str, value: Any, left: int) -> None:
    if left < 0:
        raise RequestError(
            f"structured_outputs.{name} is nested deeper than {limits.MAX_JSON_DEPTH} levels", param=name
        )
    if is_mapping(value) and not all(isinstance(key, str) for key in value):
        checks.refuse(name, value, "JSON, where the keys of an object are text")
    for entry in _entries(value):
        _check_depth(name, entry, left - 1)


def _entries(value: object) -> Iterable[Any]:
    """What a dict or a list holds; nothing for any other value."""
    if is_dict(value):
        return value.values()
    return value if is_sequence(value) else ()


def _check_choice(name: str, value: Any) -> list[str]:
    words = checks.texts(name, value, limits.MAX_CHOICES, limits.MAX_GRAMMAR_BYTES)
    return words or checks.refuse(name, value, "a list of at least one string")


def _check_json_object(name: str, value: Any) -> bool:
    return True if value is True else checks.refuse(name, value, "true, or left out")


_STRUCTURED_OUTPUTS_CHECKS = checks.checks_of(
    StructuredOutputsParams,
    {
        "json": _check_json,
        "regex": functools.partial(checks.text, most=limits.MAX_REGEX_CHARS),
        "choice": _check_choice,
        "grammar": functools.partial(checks.text, most=limits.MAX_GRAMMAR_BYTES),
        "json_object": _check_json_object,
        "structural_tag": _check_json,
        "disable_any_whitespace": checks.flag,
        "disable_additional_properties": checks.flag,
        "whitespace_pattern": functools.partial(checks.text, most=limits.MAX_REGEX_CHARS),
    },
)


class Thinking(msgspec.Struct, array_like=True, frozen=True):
    """The markers of a model's reasoning, as tokens. Structured output constrains the answer after the reasoning, not the
    reasoning itself.

    Attributes:
        end: tokens that end the reasoning.
        start: the first token of the marker that begins the reasoning; None if the output begins inside the reasoning.
        close: tokens that are forced when the thinking budget is spent; empty means `end`.
        lead: tokens that may precede the reasoning and do not count as reasoning.
        over: other token sequences that show that the reasoning has ended (other channels of an answer).
        rest: the tokens after `start`, if the marker has several.
    """

    end: list[int]
    start: int | None = None
    close: list[int] = []
    lead: list[int] = []
    over: list[list[int]] = []
    rest: list[int] = []

    @property
    def opening(self) -> list[int]:
        """The tokens of the marker that begins the reasoning; empty if the output begins inside the reasoning."""
        return [] if self.start is None else [self.start, *self.rest]


class RepetitionDetectionParams(
    msgspec.Struct, metaclass=checks.ParamsMeta, omit_defaults=True, forbid_unknown_fields=True
):
    """Ends an output that repeats itself: its last tokens are one pattern, `min_count` times in a row.

    Attributes:
        max_pattern_size: tokens of the longest pattern; 0 turns the detection off.
        min_pattern_size: tokens of the shortest pattern; 0 means 1.
        min_count: repetitions that end the output, 2 or more.

    Raises:
        RequestError: a value of the wrong type or out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        checks.apply(_REPETITION_CHECKS, self)
        check_count = checks.whole_rule(2 if self.is_on else 0, limits.MAX_TOKENS)
        self.min_count = check_count("min_count", self.min_count)
        if self.min_pattern_size > self.max_pattern_size:
            checks.refuse(
                "min_pattern_size", self.min_pattern_size, f"at most max_pattern_size={self.max_pattern_size}"
            )

    @property
    def is_on(self) -> bool:
        """Whether repetitions end the output."""
        return self.max_pattern_size != 0


_REPETITION_CHECKS = checks.checks_of(
    RepetitionDetectionParams,
    {
        "max_pattern_size": checks.whole_rule(0, limits.MAX_PATTERN_SIZE),
        "min_pattern_size": checks.whole_rule(0, limits.MAX_PATTERN_SIZE),
    },
)


class SamplingParams(
    msgspec.Struct,
    metaclass=checks.ParamsMeta,
    omit_defaults=True,
    repr_omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
):
    """Sampling parameters of one request; the names and meanings that users of vLLM know.

    Attributes:
        n: sequences to generate; 1 where sampling is greedy.
        presence_penalty, frequency_penalty: -2 to 2, subtracted once or for each occurrence in the output.
        repetition_penalty: above 0; divides (or multiplies, where negative) logits of tokens seen in prompt or output.
        temperature: 0 to 2; below 1e-5 means greedy, from there to 0.01 means 0.01.
        top_p: above 0, at most 1. top_k: 0 or -1 means all. min_p: 0 to 1, relative to the likeliest token.
        seed: makes the tokens reproducible; None (or -1) means a random seed.
        stop: strings that end the output; they need `detokenize`. stop_token_ids: further ids that end the output.
        max_tokens: None means up to the model's length. min_tokens: the output has at least that many.
        logprobs, prompt_logprobs: alternatives a position; 0 for the token's own alone, -1 for the whole vocabulary.
        logprob_token_ids: tokens whose logprobs each position returns, instead of the likeliest ones.
        thinking_token_budget: tokens that a model may reason with (-1 or None: no limit); then the end of the reasoning is
            forced. Needs a model whose reasoning is marked.
        repetition_detection: ends an output that repeats itself, with finish reason `repetition`.
        trace_decode_token_ids: the very tokens of the output, for the logprobs and times that they have; `max_tokens` and what
            else ends an output are as these say.
        stream_interval: tokens that a stream sends together, after the first one; the engine's setting is the minimum.
        truncate_prompt_tokens: keep that many tokens at the prompt's end; -1 for as many as fit.

    Raises:
        RequestError: a value of the wrong type or out of range; `param` names it.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[Callable[..., Any]] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    trace_decode_token_ids: list[int] | None = None

    # The input processor and the server fill these fields, never users.
    thinking: Thinking | None = None
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every parameter and bring it to its normal form. The constructor does this; call it after assignments.

        Raises:
            RequestError: a value of the wrong type or out of range.
        """
        checks.apply(_SAMPLING_CHECKS, self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            checks.refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids without it", param="stop")
        if self.trace_decode_token_ids is not None and (
            self.structured_outputs or self.thinking_token_budget is not None
        ):
            message = "trace_decode_token_ids are the whole output: structured_outputs and thinking_token_budget must be left out"
            raise RequestError(message, param="trace_decode_token_ids")
        if self.temperature < GREEDY_BELOW:
            self._make_greedy()

    def follow_trace(self) -> list[int]:
        """Let the trace decide where the output ends; returns it, empty where there is none."""
        if self.trace_decode_token_ids is None:
            return []
        self.max_tokens, self.min_tokens, self.ignore_eos = len(self.trace_decode_token_ids), 0, True
        self.stop = self.stop_token_ids = self.repetition_detection = None
        return self.trace_decode_token_ids

    def _make_greedy(self) -> None:
        if self.n != 1:
            checks.refuse("n", self.n, "1 where sampling is greedy (temperature=0): every sequence would be the same")
        self.temperature = 0.0
        self.top_p = 1.0
        self.top_k = 0
        self.min_p = 0.0

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Make parameters from values where None means the default; `max_tokens=None` keeps its own meaning.

        Raises:
            RequestError: as the constructor, and for `logit_bias` keys that are not token ids.
        """
        given: dict[str, Any] = {
            name: value for name, value in values.items() if value is not None or name == "max_tokens"
        }
        bias = given.get("logit_bias")
        if is_mapping(bias):
            try:
                given["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
            except (TypeError, ValueError):
                checks.refuse("logit_bias", list(bias), "an object from token ids to numbers")
        return cls(**given)

    def clone(self) -> Self:
        """A copy that shares nothing that could be changed, except the functions in `logits_processors`."""
        shared = {id(function): function for function in self.logits_processors or ()}
        return copy.deepcopy(self, shared)

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Add the EOS ids of the tokenizer and of the model's generation config to those that end the output."""
        listed = generation_config.get("eos_token_id")
        found: list[Any] = [eos_token_id, *(listed if is_sequence(listed) else [listed])]
        ids = list(self.eos_token_ids)
        for token_id in found:
            if isinstance(token_id, int) and token_id not in ids:
                ids.append(token_id)
        self.eos_token_ids = ids

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with the user's seed."""
        if self.temperature < GREEDY_BELOW:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED


def _check_temperature(name: str, value: Any) -> float:
    """Low temperatures are raised: logits divided by less than `LEAST_TEMPERATURE` overflow half precision."""
    temperature = checks.real(name, value, 0.0, MOST_TEMPERATURE, "a number from 0 to 2")
    return LEAST_TEMPERATURE if GREEDY_BELOW <= temperature < LEAST_TEMPERATURE else temperature


def _check_top_k(name: str, value: Any) -> int:
    top_k = checks.whole(name, value, -1, _INT64, "0 or -1 (all), or a whole number from 1")
    return 0 if top_k == -1 else min(top_k, _INT32_MAX)


def _check_logprobs(name: str, value: Any) -> int | None:
    if isinstance(value, bool):
        return 1 if value else None  # not 0, which asks for the logprob of the token itself
    return checks.whole(name, value, -1, _INT32_MAX, "a whole number from 0, -1 (the whole vocabulary), or null")


def _check_logprob_token_ids(name: str, value: Any) -> list[int] | None:
    return list(dict.fromkeys(checks.token_ids(name, value, limits.MAX_LOGPROB_TOKEN_IDS))) or None


def _check_stop(name: str, value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else value
    return checks.texts(name, given, limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS)


def _check_allowed_token_ids(name: str, value: Any) -> list[int]:
    allowed = checks.token_ids(name, value, limits.MAX_ALLOWED_TOKEN_IDS)
    if not allowed:
        raise RequestError(f"{name} is empty: no token could be sampled", param=name)
    return allowed


def _check_truncation(name: str, value: Any) -> int:
    allowed = "a whole number from 1, -1 (as many as fit), or null"
    return checks.whole(name, value, -1, _INT32_MAX, allowed) or checks.refuse(name, 0, allowed)


def _check_output_kind(name: str, value: Any) -> RequestOutputKind:
    try:
        return RequestOutputKind(value)
    except ValueError:
        checks.refuse(name, value, "CUMULATIVE, DELTA or FINAL_ONLY")


def _check_repetition(name: str, value: Any) -> RepetitionDetectionParams | None:
    if not is_dict(value):
        return checks.instance(name, value, RepetitionDetectionParams)
    allowed = RepetitionDetectionParams.__struct_fields__
    if unknown := [key for key in value if key not in allowed]:
        checks.refuse(name, unknown[0], f"an object with {', '.join(allowed)}")
    return RepetitionDetectionParams(**value)


def _check_extra_args(name: str, value: Any) -> dict[str, Any]:
    if not is_dict(value) or not all(type(key) is str for key in value):
        checks.refuse(name, value, "a dict with string keys")
    if len(value) > limits.MAX_EXTRA_ARGS:
        raise RequestError(f"{name} has {len(value)} entries; at most {limits.MAX_EXTRA_ARGS} are allowed", param=name)
    if (number := _too_large(value)) is not None:
        checks.refuse(name, number, "made of whole numbers from -2**63 to 2**64 - 1, which can be sent")
    return value


def _too_large(values: object) -> int | None:
    """The first whole number in these containers that does not fit into a message between processes."""
    pending, seen = [values], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, int) and not -_INT64 <= value < 2 * _INT64:
            return value
        if id(value) not in seen:  # a container may hold itself
            seen.add(id(value))
            pending += _entries(value)
    return None


def _check_bias(name: str, value: Any) -> dict[int, float]:
    """Token id to bias, clamped to the allowed range."""
    if not is_mapping(value):
        checks.refuse(name, value, "an object from token ids to numbers")
    if len(value) > limits.MAX_LOGIT_BIAS:
        raise RequestError(f"{name} has {len(value)} entries; at most {limits.MAX_LOGIT_BIAS} are allowed", param=name)
    low, high = limits.LOGIT_BIAS_RANGE
    checked: dict[int, float] = {}
    for token_id, bias in value.items():
        number = checks.real(name, bias, -3.4e38, 3.4e38, "an object from token ids to finite numbers")
        token = checks.whole(name, token_id, 0, _INT64, "an object whose keys are token ids")
        checked[token] = min(max(number, low), high)
    return checked


def _check_trace(name: str, value: Any) -> list[int]:
    return checks.token_ids(name, value, limits.MAX_TOKENS) or checks.refuse(name, value, "at least one token id")


_TOKENS = limits.MAX_TOKENS
_SAMPLING_CHECKS = checks.checks_of(
    SamplingParams,
    {
        "n": checks.whole_rule(1, limits.MAX_N),
        "presence_penalty": checks.real_rule(-2.0, 2.0),
        "frequency_penalty": checks.real_rule(-2.0, 2.0),
        "repetition_penalty": checks.real_rule(1e-9, 1e9, "a finite number above 0"),
        "temperature": _check_temperature,
        "top_p": checks.real_rule(1e-9, 1.0, "a number above 0 and at most 1"),
        "top_k": _check_top_k,
        "min_p": checks.real_rule(0.0, 1.0),
        "seed": checks.without(
            -1, checks.whole_rule(-_INT64, _INT64 - 1, "a whole number of at most 64 bits, or null")
        ),
        "stop": _check_stop,
        "stop_token_ids": functools.partial(checks.token_ids, most=limits.MAX_STOP_TOKEN_IDS),
        "ignore_eos": checks.flag,
        "max_tokens": checks.or_none(checks.whole_rule(1, _TOKENS, f"a whole number from 1 to {_TOKENS}, or null")),
        "min_tokens": checks.whole_rule(0, _TOKENS),
        "logprobs": _check_logprobs,
        "prompt_logprobs": _check_logprobs,
        "logprob_token_ids": _check_logprob_token_ids,
        "flat_logprobs": checks.flag,
        "detokenize": checks.flag,
        "skip_special_tokens": checks.flag,
        "spaces_between_special_tokens": checks.flag,
        "include_stop_str_in_output": checks.flag,
        "truncate_prompt_tokens": _check_truncation,
        "output_kind": _check_output_kind,
        "stream_interval": checks.whole_rule(
            1, limits.MAX_STREAM_INTERVAL, f"a whole number from 1 to {limits.MAX_STREAM_INTERVAL}, or null"
        ),
        "structured_outputs": functools.partial(checks.instance, kind=StructuredOutputsParams),
        "logit_bias": _check_bias,
        "allowed_token_ids": _check_allowed_token_ids,
        "bad_words": functools.partial(checks.texts, most=limits.MAX_BAD_WORDS, most_chars=limits.MAX_BAD_WORD_CHARS),
        "logits_processors": functools.partial(checks.functions, most=_MOST_LOGITS_PROCESSORS),
        "extra_args": _check_extra_args,
        "skip_reading_prefix_cache": checks.flag,
        "thinking_token_budget": checks.without(
            -1, checks.whole_rule(-1, _TOKENS, f"a whole number from 0 to {_TOKENS}, -1 (no limit), or null")
        ),
        "repetition_detection": _check_repetition,
        "trace_decode_token_ids": _check_trace,
    },
)


class BeamSearchParams(
    msgspec.Struct, metaclass=checks.ParamsMeta, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """Beam search over `beam_width` hypotheses of at most `max_tokens` tokens.

    Attributes:
        length_penalty: a finished hypothesis' logprob is divided by its length to this power.

    Raises:
        RequestError: a value of the wrong type or out of range; `param` names it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checks.apply(_BEAM_SEARCH_CHECKS, self)


_BEAM_SEARCH_CHECKS = checks.checks_of(
    BeamSearchParams,
    {
        "beam_width": checks.whole_rule(1, limits.MAX_BEAM_WIDTH),
        "max_tokens": checks.whole_rule(1, limits.MAX_TOKENS),
        "ignore_eos": checks.flag,
        "temperature": checks.real_rule(0.0, MOST_TEMPERATURE),
        "length_penalty": checks.real_rule(-100.0, 100.0),
        "include_stop_str_in_output": checks.flag,
        "skip_special_tokens": checks.flag,
    },
)
