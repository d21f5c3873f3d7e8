"""From a request's fields to `SamplingParams` (or `BeamSearchParams`).

A field that the request does not mention comes from the model's generation config, then from `SamplingParams`' default.
Ranges are checked by `SamplingParams` itself; its `RequestError` becomes a 400. A field that the protocol has and this server cannot serve yet is refused by
name: one that is silently dropped gives a wrong answer that looks right.
"""

from typing import Any

from quire.config import limits
from quire.entrypoints.openai.errors import HTTPError, bad_field, bad_request
from quire.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields, StreamOptions
from quire.entrypoints.openai.state import ServerSettings
from quire.entrypoints.openai.structured import read_constraint
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; chat completions may run to the end of the context."""

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "prompt_logprobs", "allowed_token_ids",
    "bad_words", "logprob_token_ids", "thinking_token_budget", "repetition_detection", "stream_interval",
)  # fmt: skip
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve_max_tokens(
    asked: int | None, num_prompt_tokens: int, max_model_len: int, model_default: Any, field: str, prompt_field: str
) -> int:
    """How many tokens a request may generate.
    Raises HTTPError: 400 when the prompt leaves no room, or the prompt and `asked` together do not fit."""
    room = max_model_len - num_prompt_tokens
    limit = f"The model's maximum context length is {max_model_len} tokens"
    if room < 1:
        message = f"{limit}, and the prompt has {num_prompt_tokens}; shorten the prompt."
        raise bad_field(prompt_field, message, "context_length_exceeded")
    if asked is None:
        return min(room, int(model_default)) if model_default else room
    if asked > room:
        message = (
            f"{limit}; the prompt has {num_prompt_tokens} and {asked} more were asked for. "
            f"Ask for at most {room}, or shorten the prompt."
        )
        raise bad_field(field, message, "context_length_exceeded")
    return asked


def build_sampling_params(
    request: GenerationFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    defaults: dict[str, Any],
    n: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The parameters of a sampled (or greedy) request; `n` and `prompt_logprobs` replace the request's own."""
    values: dict[str, Any] = {name: defaults[name] for name in _FROM_MODEL if defaults.get(name) is not None}
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    if n is not None:
        values["n"] = n
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = prompt_logprobs
    values["max_tokens"] = max_tokens
    values["logprobs"] = logprobs
    values["logit_bias"] = _logit_bias(request.logit_bias)
    values["structured_outputs"] = read_constraint(request)
    values["extra_args"] = request.vllm_xargs
    values["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        wrong = next((key for key in bias if not key.strip().lstrip("-").isdigit()), min(bias, key=len))
        raise bad_field("logit_bias", f"{wrong[:100]!r} is not a token id.") from None


def build_beam_search_params(
    request: GenerationFields, *, max_tokens: int, defaults: dict[str, Any]
) -> BeamSearchParams:
    """The parameters of a beam search; `n` is the beam width, as in vLLM."""
    if request.stream:
        raise bad_field("stream", "beam search has no tokens to stream before it ends.")
    if read_constraint(request) is not None:
        raise bad_field("structured_outputs", "beam search follows no grammar.")
    width = 1 if request.n is None else request.n
    if not 1 <= width <= limits.MAX_BEAM_WIDTH:
        raise bad_field("n", f"{width} is out of range; a beam search takes 1 to {limits.MAX_BEAM_WIDTH}.")
    temperature = request.temperature if request.temperature is not None else defaults.get("temperature")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=bool(request.ignore_eos),
        temperature=float(temperature or 0.0),
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def asked_completion_tokens(request: CompletionRequest) -> int:
    return DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


def asked_chat_tokens(request: ChatCompletionRequest) -> tuple[int | None, str]:
    """`max_completion_tokens`, or its older name; and the name that was used."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def chat_logprobs_count(request: ChatCompletionRequest) -> int | None:
    """How many alternatives a token the sampler must report; None for none at all."""
    if request.top_logprobs is not None and not request.logprobs and request.top_logprobs != 0:
        raise bad_field("top_logprobs", "needs logprobs to be true.")
    if request.top_logprobs is not None and not -1 <= request.top_logprobs < 1 << 31:
        raise bad_field("top_logprobs", f"{request.top_logprobs} is out of range; at least 0, below 2 ** 31.")
    return (request.top_logprobs or 0) if request.logprobs else None


def check_stream_options(request: GenerationFields) -> None:
    """`stream_options` only make sense on a stream."""
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "only allowed when stream is true.")


_NOT_YET = (
    *("logits_processors", "kv_transfer_params", "mm_processor_kwargs", "suffix", "prompt_embeds"),
    *("audio", "prediction", "functions", "function_call", "web_search_options"),
)


def _is_set(value: Any) -> bool:
    """Whether a value asks for something; `{}` does: as a schema it means any JSON."""
    return value is not None and value is not False and value != "" and value != []


def _refuse(field: str, value: Any = None) -> HTTPError:
    shown = f" ({value!r})" if value is not None else ""
    return bad_request(f"{field}{shown} is not supported yet.", param=field, code="not_supported")


def refuse_unsupported(request: GenerationFields) -> None:
    """Raise a 400 that names the first field which cannot be served."""
    for field in _NOT_YET:
        if _is_set(getattr(request, field, None)):
            raise _refuse(field)
    modalities = getattr(request, "modalities", None)
    if modalities and modalities != ["text"]:
        raise _refuse("modalities", modalities)


def apply_defaults(settings: ServerSettings, request: GenerationFields) -> None:
    """Write the operator's choices into a request; what it says itself stays."""
    if request.return_tokens_as_token_ids is None:
        request.return_tokens_as_token_ids = settings.return_tokens_as_token_ids
    if request.stream and settings.enable_force_include_usage:
        request.stream_options = request.stream_options or StreamOptions()
        request.stream_options.include_usage = True
