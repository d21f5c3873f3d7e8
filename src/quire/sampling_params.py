"""How to sample: one request's parameters, checked when they are made.

Knows ranges. Knows nothing of tensors, tokenizers or the model (what depends on those is checked by the input
processor).
"""

import copy
import enum
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from quire import param_checks as checks
from quire.config import limits
from quire.errors import RequestError
from quire.guards import is_dict, is_mapping, is_sequence

GREEDY_BELOW = 1e-5
"""Temperatures under this mean greedy."""
LEAST_TEMPERATURE = 0.01
"""Temperatures above greedy and under this are raised to it: logits divided by less overflow half precision."""
MOST_TEMPERATURE = 2.0
_INT32_MAX = (1 << 31) - 1
_INT64 = 1 << 63
_MOST_LOGITS_PROCESSORS = 64

_FLAGS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class RequestOutputKind(enum.IntEnum):
    """What each output of a request carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(enum.IntEnum):
    """Three ways to draw a token."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class StructuredOutputsParams(
    msgspec.Struct, metaclass=checks.ParamsMeta, omit_defaults=True, forbid_unknown_fields=True
):
    """One constraint on the output's form; exactly one of the first six."""

    json: str | dict[str, Any] | None = None
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
        _CONSTRAINT_CHECKS[given[0]](getattr(self, given[0]))
        checks.flag("disable_any_whitespace", self.disable_any_whitespace)
        checks.flag("disable_additional_properties", self.disable_additional_properties)
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern, limits.MAX_REGEX_CHARS)

    def constraint(self) -> tuple[str, Any]:
        """The one that is set: (`regex`, its value), for example."""
        return next((name, value) for name in _CONSTRAINTS if (value := getattr(self, name)) is not None)


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _check_text(name: str, value: Any, most: int) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= most:
        checks.refuse(name, value, f"text of 1 to {most} characters")


def _check_json(name: str, value: Any) -> None:
    """A JSON object (or the schema `true`), or text that holds one."""
    if isinstance(value, str):
        _check_text(name, value, limits.MAX_GRAMMAR_BYTES)
        _check_json_text(name, value)
    else:
        _check_json_value(name, value)


def _check_json_value(name: str, value: Any) -> None:
    if not is_dict(value) and not (name == "json" and isinstance(value, bool)):
        checks.refuse(name, value, f"{_JSON_VALUES[name]}: an object, or text that holds one")
    _check_depth(name, value, limits.MAX_JSON_DEPTH)


@functools.lru_cache(maxsize=16)  # a batch's requests tend to have the same one
def _check_json_text(name: str, text: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.{name} is not valid JSON: {error}", param=name) from None
    _check_json_value(name, value)


_JSON_VALUES = {"json": "a JSON schema", "structural_tag": "a structural tag"}


def _check_depth(name: str, value: Any, left: int) -> None:
    if left < 0:
        raise RequestError(
            f"structured_outputs.{name} is nested deeper than {limits.MAX_JSON_DEPTH} levels", param=name
        )
    inner = list(value.values()) if is_dict(value) else value if is_sequence(value) else ()
    for part in inner:
        _check_depth(name, part, left - 1)


def _check_choice(value: Any) -> None:
    if not checks.texts("choice", value, limits.MAX_CHOICES, limits.MAX_GRAMMAR_BYTES):
        checks.refuse("choice", value, "a list of at least one string")


def _check_json_object(value: Any) -> None:
    if value is not True:
        checks.refuse("json_object", value, "true, or left out")


_CONSTRAINT_CHECKS: dict[str, Callable[[Any], None]] = {
    "json": lambda value: _check_json("json", value),
    "regex": lambda value: _check_text("regex", value, limits.MAX_REGEX_CHARS),
    "choice": _check_choice,
    "grammar": lambda value: _check_text("grammar", value, limits.MAX_GRAMMAR_BYTES),
    "json_object": _check_json_object,
    "structural_tag": lambda value: _check_json("structural_tag", value),
}


class Thinking(msgspec.Struct, array_like=True, frozen=True):
    """Where a model thinks before it answers: a form is asked of the answer alone.

    Attributes:
        end: tokens that end it.
        start: the token that begins it, if an answer may also begin without; None where the output begins inside.
        close: what is forced where a budget is spent; nothing means `end`.
        lead: tokens that are no thoughts, at the beginning of the output and of what is thought again.
        over: what else tells that it has ended: other channels of an answer.
        rest: the tokens behind `start`, where the marker that begins it has several.
    """

    end: list[int]
    start: int | None = None
    close: list[int] = []
    lead: list[int] = []
    over: list[list[int]] = []
    rest: list[int] = []

    @property
    def opening(self) -> list[int]:
        """The tokens of the marker that begins it; none where the output begins inside."""
        return [] if self.start is None else [self.start, *self.rest]


class RepetitionDetectionParams(
    msgspec.Struct, metaclass=checks.ParamsMeta, omit_defaults=True, forbid_unknown_fields=True
):
    """What ends an output that goes round in circles: its last tokens are one pattern, `min_count` times in a row.

    Attributes:
        max_pattern_size: tokens of the longest pattern that is looked for; 0 looks for none.
        min_pattern_size: of the shortest; 0 means 1.
        min_count: repetitions that end it, 2 or more.

    Raises:
        RequestError: a value of the wrong type or out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        most = limits.MAX_PATTERN_SIZE
        for name, low in (("max_pattern_size", 0), ("min_pattern_size", 0), ("min_count", 2 * self.is_on)):
            high = limits.MAX_TOKENS if name == "min_count" else most
            setattr(
                self, name, checks.whole(name, getattr(self, name), low, high, f"a whole number from {low} to {high}")
            )
        if self.min_pattern_size > self.max_pattern_size:
            checks.refuse(
                "min_pattern_size", self.min_pattern_size, f"at most max_pattern_size={self.max_pattern_size}"
            )

    @property
    def is_on(self) -> bool:
        """Whether it looks for anything."""
        return self.max_pattern_size != 0


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
        seed: makes the tokens reproducible; None (or -1) draws one.
        stop: strings that end the output; they need `detokenize`. stop_token_ids: further ids that end it.
        max_tokens: None means up to the model's length. min_tokens: no end before that many.
        logprobs, prompt_logprobs: alternatives a position; 0 for the token's own alone, -1 for the whole vocabulary.
        logprob_token_ids: tokens whose logprobs are told at every position, in place of the likeliest ones.
        thinking_token_budget: tokens that a model may reason with (-1 or None: no limit); then the end of the reasoning is
            forced. Needs a model whose reasoning is marked.
        repetition_detection: ends an output that repeats itself, with finish reason `repetition`.
        stream_interval: tokens that are told together, after the first one; the engine's own number is the least.
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

    # Filled by the input processor and the server, never by users.
    thinking: Thinking | None = None
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every parameter and bring it to its normal form; construction does it, later assignments may ask again.

        Raises:
            RequestError: a value of the wrong type or out of range.
        """
        self._check_numbers()
        self._check_logprobs()
        for name in _FLAGS:
            value = getattr(self, name)
            if value is not True and value is not False:
                checks.refuse(name, value, "true or false")
        self._check_lists()
        self._check_others()
        if self.temperature < GREEDY_BELOW:
            self._make_greedy()

    def _check_numbers(self) -> None:
        self.n = checks.whole("n", self.n, 1, limits.MAX_N, f"a whole number from 1 to {limits.MAX_N}")
        self.presence_penalty = checks.real(
            "presence_penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2"
        )
        self.frequency_penalty = checks.real(
            "frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2"
        )
        self.repetition_penalty = checks.real(
            "repetition_penalty", self.repetition_penalty, 1e-9, 1e9, "a finite number above 0"
        )
        self.temperature = checks.real("temperature", self.temperature, 0.0, MOST_TEMPERATURE, "a number from 0 to 2")
        if GREEDY_BELOW <= self.temperature < LEAST_TEMPERATURE:
            self.temperature = LEAST_TEMPERATURE
        self.top_p = checks.real("top_p", self.top_p, 1e-9, 1.0, "a number above 0 and at most 1")
        top_k = checks.whole("top_k", self.top_k, -1, _INT64, "0 or -1 (all), or a whole number from 1")
        self.top_k = 0 if top_k == -1 else min(top_k, _INT32_MAX)
        self.min_p = checks.real("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        if self.seed is not None:
            seed = checks.whole("seed", self.seed, -_INT64, _INT64 - 1, "a whole number of at most 64 bits, or null")
            self.seed = None if seed == -1 else seed
        if self.max_tokens is not None:
            allowed = f"a whole number from 1 to {limits.MAX_TOKENS}, or null"
            self.max_tokens = checks.whole("max_tokens", self.max_tokens, 1, limits.MAX_TOKENS, allowed)
        allowed = f"a whole number from 0 to {limits.MAX_TOKENS}"
        self.min_tokens = checks.whole("min_tokens", self.min_tokens, 0, limits.MAX_TOKENS, allowed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            checks.refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")

    def _check_logprobs(self) -> None:
        allowed = "a whole number from 0, -1 (the whole vocabulary), or null"
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:  # as 1; False is not 0, which asks for the token's own
                setattr(self, name, 1)
            elif getattr(self, name) is False:
                setattr(self, name, None)
        if self.logprobs is not None:
            self.logprobs = checks.whole("logprobs", self.logprobs, -1, _INT32_MAX, allowed)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = checks.whole("prompt_logprobs", self.prompt_logprobs, -1, _INT32_MAX, allowed)
        if self.logprob_token_ids is not None:
            given = checks.token_ids("logprob_token_ids", self.logprob_token_ids, limits.MAX_LOGPROB_TOKEN_IDS)
            self.logprob_token_ids = list(dict.fromkeys(given)) or None

    def _check_lists(self) -> None:
        if self.stop is not None:
            given = [self.stop] if isinstance(self.stop, str) else self.stop
            self.stop = checks.texts("stop", given, limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS)
            if self.stop and not self.detokenize:
                raise RequestError("stop strings need detokenize=True; use stop_token_ids without it", param="stop")
        if self.stop_token_ids is not None:
            self.stop_token_ids = checks.token_ids("stop_token_ids", self.stop_token_ids, limits.MAX_STOP_TOKEN_IDS)
        if self.bad_words is not None:
            self.bad_words = checks.texts("bad_words", self.bad_words, limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_CHARS)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = checks.token_ids(
                "allowed_token_ids", self.allowed_token_ids, limits.MAX_ALLOWED_TOKEN_IDS
            )
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids")
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)
        if self.logits_processors is not None:
            self.logits_processors = checks.functions(
                "logits_processors", self.logits_processors, _MOST_LOGITS_PROCESSORS
            )

    def _check_others(self) -> None:
        if self.truncate_prompt_tokens is not None:
            allowed = "a whole number from 1, -1 (as many as fit), or null"
            kept = checks.whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, _INT32_MAX, allowed)
            if kept == 0:
                checks.refuse("truncate_prompt_tokens", 0, allowed)
        if type(self.output_kind) is not RequestOutputKind:
            try:
                self.output_kind = RequestOutputKind(self.output_kind)
            except ValueError:
                checks.refuse("output_kind", self.output_kind, "CUMULATIVE, DELTA or FINAL_ONLY")
        if self.stream_interval is not None:
            name, most = "stream_interval", limits.MAX_STREAM_INTERVAL
            allowed = f"a whole number from 1 to {most}, or null"
            self.stream_interval = checks.whole(name, self.stream_interval, 1, most, allowed)
        structured: Any = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            checks.refuse("structured_outputs", structured, "StructuredOutputsParams, or None")
        repetition: Any = self.repetition_detection
        if is_dict(repetition):
            self.repetition_detection = _repetition(repetition)
        elif repetition is not None and not isinstance(repetition, RepetitionDetectionParams):
            checks.refuse("repetition_detection", repetition, "RepetitionDetectionParams, or None")
        if self.thinking_token_budget is not None:
            name, allowed = (
                "thinking_token_budget",
                f"a whole number from 0 to {limits.MAX_TOKENS}, -1 (no limit), or null",
            )
            budget = checks.whole(name, self.thinking_token_budget, -1, limits.MAX_TOKENS, allowed)
            self.thinking_token_budget = None if budget == -1 else budget
        if self.extra_args is not None:
            _check_extra_args(self.extra_args)
        if self.skip_reading_prefix_cache is not None:
            checks.flag("skip_reading_prefix_cache", self.skip_reading_prefix_cache)

    def _make_greedy(self) -> None:
        if self.n != 1:
            checks.refuse("n", self.n, "1 where sampling is greedy (temperature=0): every sequence would be the same")
        self.temperature = 0.0
        self.top_p = 1.0
        self.top_k = 0
        self.min_p = 0.0

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """From values where None means "the default"; `max_tokens=None` keeps its own meaning.

        Raises:
            RequestError: as the constructor; also for `logit_bias` keys that are not token ids.
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
        copied = copy.copy(self)
        for name in _MUTABLE:
            value = getattr(copied, name)
            if value is not None:
                setattr(copied, name, list(value) if name == "logits_processors" else copy.deepcopy(value))
        return copied

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Let generation also end at the model's eos ids: the tokenizer's own, and those of its generation config."""
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


_MUTABLE = (
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "logprob_token_ids",
    "repetition_detection",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
    "extra_args",
    "eos_token_ids",
    "bad_words_token_ids",
)


def _repetition(given: dict[Any, Any]) -> RepetitionDetectionParams:
    allowed = RepetitionDetectionParams.__struct_fields__
    if unknown := [key for key in given if key not in allowed]:
        checks.refuse("repetition_detection", unknown[0], f"an object with {', '.join(allowed)}")
    return RepetitionDetectionParams(**given)


def _check_extra_args(extra: Any) -> None:
    if not is_dict(extra) or not all(type(key) is str for key in extra):
        checks.refuse("extra_args", extra, "a dict with string keys")
    if len(extra) > limits.MAX_EXTRA_ARGS:
        raise RequestError(
            f"extra_args has {len(extra)} entries; at most {limits.MAX_EXTRA_ARGS} are allowed", param="extra_args"
        )
    if (number := _too_large(extra)) is not None:
        checks.refuse("extra_args", number, "made of whole numbers from -2**63 to 2**64 - 1, which can be sent")


def _too_large(values: object) -> int | None:
    """A whole number somewhere in these containers that messages between processes have no room for."""
    pending, seen = [values], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, int) and not -_INT64 <= value < 2 * _INT64:
            return value
        inner = list(value.values()) if is_dict(value) else value if is_sequence(value) else ()
        if inner and id(value) not in seen:
            seen.add(id(value))
            pending += inner
    return None


def _checked_bias(bias: Any) -> dict[int, float]:
    """Token id to bias, clamped to what is allowed."""
    if not is_mapping(bias):
        checks.refuse("logit_bias", bias, "an object from token ids to numbers")
    if len(bias) > limits.MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(bias)} entries; at most {limits.MAX_LOGIT_BIAS} are allowed", param="logit_bias"
        )
    low, high = limits.LOGIT_BIAS_RANGE
    checked: dict[int, float] = {}
    for token_id, value in bias.items():
        number = checks.real("logit_bias", value, -3.4e38, 3.4e38, "an object from token ids to finite numbers")
        token = checks.whole("logit_bias", token_id, 0, _INT64, "an object whose keys are token ids")
        checked[token] = min(max(number, low), high)
    return checked


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
        most = limits.MAX_BEAM_WIDTH
        self.beam_width = checks.whole("beam_width", self.beam_width, 1, most, f"a whole number from 1 to {most}")
        allowed = f"a whole number from 1 to {limits.MAX_TOKENS}"
        self.max_tokens = checks.whole("max_tokens", self.max_tokens, 1, limits.MAX_TOKENS, allowed)
        self.temperature = checks.real("temperature", self.temperature, 0.0, MOST_TEMPERATURE, "a number from 0 to 2")
        self.length_penalty = checks.real(
            "length_penalty", self.length_penalty, -100.0, 100.0, "a number from -100 to 100"
        )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            checks.flag(name, getattr(self, name))
