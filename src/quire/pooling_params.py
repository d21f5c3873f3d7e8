"""How to pool: one pooling request's parameters, checked when they are made."""

import copy
import functools
from typing import Any, Self

import msgspec

from quire import param_checks as checks
from quire.guards import is_dict

POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")
_MOST = (1 << 31) - 1
_MOST_CHUNK = (1 << 63) - 1


class LateChunkingParams(msgspec.Struct, metaclass=checks.ParamsMeta, forbid_unknown_fields=True):
    """Late chunking (Günther et al. 2024): a text is computed whole, and each `chunk_size` of its tokens, special ones included,
    become one vector: the head's, of their mean. Raises RequestError: `chunk_size` is no whole number from 1."""

    chunk_size: int

    def __post_init__(self) -> None:
        self.chunk_size = checks.whole(
            "late_chunking_params.chunk_size", self.chunk_size, 1, _MOST_CHUNK, "a whole number from 1"
        )


class PoolingParams(
    msgspec.Struct,
    metaclass=checks.ParamsMeta,
    omit_defaults=True,
    repr_omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
):
    """Pooling parameters of one request.

    Attributes:
        task: `embed` (a vector), `classify` (a number a class), `token_embed` or `token_classify` (the same for every
            token); None lets the engine choose.
        dimensions: keep only so many dimensions of an embedding, for models that were trained so (matryoshka).
        use_activation: normalise embeddings, turn scores into probabilities; None means as the model says.
        truncate_prompt_tokens: keep only so many tokens of a prompt, special ones included; -1 means as many as fit.
        truncation_side: where a prompt is cut: `right` (its end, also None) or `left`. Pairs of texts are cut at the right.
        step_tag_id: give only the positions of this token (process reward models); None means as the model says.
        returned_token_ids: of a token's numbers, only these columns; None means as the model says.
        skip_reading_prefix_cache: None lets the engine decide: it reads where the last token alone counts.
        normalize, activation: other spellings of `use_activation`.
        token_type_ids: the segment of each prompt token; the engine fills it in for pairs of texts.
        late_chunking_params: of `token_embed`: a vector for each chunk of the text in place of one for each token; the
            output's `late_chunking` says which tokens and characters are in each.

    Raises:
        RequestError: a value of the wrong type or out of range; `param` names it.
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    normalize: bool | None = None
    activation: bool | None = None
    token_type_ids: list[int] | None = None
    late_chunking_params: LateChunkingParams | None = None

    def __post_init__(self) -> None:
        checks.apply(_CHECKS, self)
        for name in ("normalize", "activation"):
            if getattr(self, name) is not None:
                self.use_activation = getattr(self, name)
                setattr(self, name, None)
        if self.truncate_prompt_tokens == 0:
            checks.refuse("truncate_prompt_tokens", 0, "a whole number from 1, -1, or null")

    def clone(self) -> Self:
        """A copy."""
        return copy.copy(self)


def _whole(low: int) -> checks.Rule:
    return checks.whole_rule(low, _MOST, f"a whole number from {low}, or null")


def _late_chunking(name: str, value: Any) -> LateChunkingParams:
    if isinstance(value, LateChunkingParams):
        return value
    if not is_dict(value) or set(value) != {"chunk_size"}:
        checks.refuse(name, value, "an object with chunk_size, a whole number from 1, or null")
    return LateChunkingParams(**value)


_CHECKS = checks.checks_of(
    PoolingParams,
    {
        "task": functools.partial(
            checks.one_of, words=POOLING_TASKS, allowed=f"one of {', '.join(POOLING_TASKS)}, or null"
        ),
        "dimensions": _whole(1),
        "use_activation": checks.flag,
        "truncate_prompt_tokens": _whole(-1),
        "truncation_side": functools.partial(checks.one_of, words=("left", "right"), allowed="left, right, or null"),
        "step_tag_id": _whole(0),
        "returned_token_ids": functools.partial(checks.token_ids, most=_MOST),
        "skip_reading_prefix_cache": checks.flag,
        "normalize": checks.flag,
        "activation": checks.flag,
        "token_type_ids": functools.partial(checks.token_ids, most=_MOST),
        "late_chunking_params": _late_chunking,
    },
)
