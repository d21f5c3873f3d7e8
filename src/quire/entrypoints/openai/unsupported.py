"""Fields that the protocol has and this server cannot serve yet: refused by name, never ignored.

A field that is silently dropped gives a wrong answer that looks right.
"""

from typing import Any

from quire.entrypoints.openai.errors import HTTPError, bad_field, bad_request
from quire.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields

_NOT_YET = ("logits_processors", "kv_transfer_params", "mm_processor_kwargs")
_CHAT_NOT_YET = ("audio", "prediction", "functions", "function_call", "web_search_options")
_COMPLETION_NOT_YET = ("suffix", "prompt_embeds")


def _is_set(value: Any) -> bool:
    """Whether a value asks for something; `{}` does: as a schema it means any JSON."""
    return value is not None and value is not False and value != "" and value != []


def _refuse(field: str, value: Any = None) -> HTTPError:
    shown = f" ({value!r})" if value is not None else ""
    return bad_request(f"{field}{shown} is not supported yet.", param=field, code="not_supported")


def _refuse_common(request: GenerationFields) -> None:
    for field in _NOT_YET:
        if _is_set(getattr(request, field)):
            raise _refuse(field)


def refuse_unsupported_completion(request: CompletionRequest) -> None:
    """Raise a 400 that names the first field which cannot be served."""
    _refuse_common(request)
    for field in _COMPLETION_NOT_YET:
        if _is_set(getattr(request, field)):
            raise _refuse(field)


def refuse_unsupported_chat(request: ChatCompletionRequest, *, trust_chat_template: bool) -> None:
    """Raise a 400 that names the first field which cannot be served."""
    _refuse_common(request)
    for field in _CHAT_NOT_YET:
        if _is_set(getattr(request, field)):
            raise _refuse(field)
    if request.modalities and request.modalities != ["text"]:
        raise _refuse("modalities", request.modalities)
    if request.chat_template is not None and not trust_chat_template:
        raise bad_field(
            "chat_template", "the operator has not allowed templates in requests (--trust-request-chat-template)."
        )
