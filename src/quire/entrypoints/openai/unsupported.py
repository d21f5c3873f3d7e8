"""Fields that the protocol has and this server cannot serve yet: refused by name, never ignored.

A field that is silently dropped gives a wrong answer that looks right.
"""

from typing import Any

from quire.entrypoints.openai.errors import HTTPError, bad_request
from quire.entrypoints.openai.protocol import GenerationFields

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
