"""What a request may say about how its text becomes tokens: `tokenization_kwargs`, with the names that users of vLLM know.

Knows token ids. Knows no tokenizer.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from quire import param_checks as checks
from quire.engine.input_processor import TokenizedPrompt, check_truncation
from quire.errors import RequestError
from quire.pooling_params import PoolingParams

_KNOWN = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side", "truncation", "max_length")
_MOST = (1 << 31) - 1


class Tokenization(NamedTuple):
    """How a text is tokenized.

    Attributes:
        add_special_tokens: None leaves it to the method: a rendered chat has its own already.
        truncate_prompt_tokens: tokens to keep; -1 means as many as fit, None all.
        truncation_side: where a prompt is cut; None leaves it to the method.
    """

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Self:
        """From a request's `tokenization_kwargs`. Raises RequestError: a key that is not known, or a wrong value."""
        options = {name: value for name, value in (given or {}).items() if value is not None}
        if unknown := [name for name in options if name not in _KNOWN]:
            message = f"tokenization_kwargs has {', '.join(map(repr, unknown))}; known are {', '.join(_KNOWN)}"
            raise RequestError(message, param="tokenization_kwargs")
        special, side = options.get("add_special_tokens"), options.get("truncation_side")
        if special is not None:
            checks.flag("add_special_tokens", special)
        if side not in (None, "left", "right"):
            checks.refuse("truncation_side", side, "left or right")
        return cls(special, _tokens_to_keep(options), side)

    def cut(self, prompts: Iterable[TokenizedPrompt], max_model_len: int) -> list[TokenizedPrompt]:
        """Prompts of requests that generate, truncated (at their start, unless `right` was asked for); one token of
        `max_model_len` is left for the output."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return list(prompts)
        check_truncation(keep, max_model_len)
        count = max(1, max_model_len - 1) if keep == -1 else keep
        part = slice(count) if self.truncation_side == "right" else slice(-count, None)
        return [prompt.with_ids(prompt.token_ids[part]) for prompt in prompts]

    def of_pooling(self, params: PoolingParams) -> PoolingParams:
        """A pooling request's parameters with the truncation that was asked for here."""
        if self.truncate_prompt_tokens is None and self.truncation_side is None:
            return params
        params = copy.copy(params)
        params.truncate_prompt_tokens = self.truncate_prompt_tokens or params.truncate_prompt_tokens
        params.truncation_side = self.truncation_side or params.truncation_side
        return params


def _tokens_to_keep(options: dict[str, Any]) -> int | None:
    """`truncate_prompt_tokens`, or what Transformers' `truncation` and `max_length` say together."""
    keep, truncation = options.get("truncate_prompt_tokens"), options.get("truncation", False)
    if truncation in (True, "longest_first"):
        keep = options.get("max_length", -1)
    elif truncation not in (False, "do_not_truncate"):
        checks.refuse("truncation", truncation, "true, false, 'longest_first' or 'do_not_truncate'")
    elif "max_length" in options:
        checks.refuse("max_length", options["max_length"], "given with truncation=True; or use truncate_prompt_tokens")
    if keep is None:
        return None
    allowed = "a whole number from 1, or -1 (as many as fit)"
    keep = checks.whole("truncate_prompt_tokens", keep, -1, _MOST, allowed)
    return keep if keep else checks.refuse("truncate_prompt_tokens", keep, allowed)
