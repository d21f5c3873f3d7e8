"""Ollama's requests → those of OpenAI's protocol, which everything behind it understands.

Checks shapes, with the paths that the client wrote. There, every model has a tag, and `latest` is the one that goes without
saying. Knows both protocols; knows nothing of templates, tokens or answers.
"""

import json
from typing import Any, TypeVar

from quire.entrypoints.http.errors import bad_field, bad_request, object_at, one_of, string_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.media_parts import PlacedPart, content_of
from quire.entrypoints.ollama.protocol import GenerationOptions, ModelFields, OllamaChat, OllamaGenerate
from quire.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
)
from quire.guards import is_dict

Fields = dict[str, Any]
RequestT = TypeVar("RequestT", bound=GenerationFields)
_ROLES = ("system", "user", "assistant", "tool")
_EFFORTS = ("low", "medium", "high", "max")
_SAMPLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
"""Options, and their names in OpenAI's requests."""
_NEUTRAL = {"typical_p": (1, 0), "tfs_z": (1,), "mirostat": (0,)}
"""Options that would change what is sampled and are not there, with the values that ask for nothing."""
_NUMBERS = (*(name for name in _SAMPLING if name != "stop"), "num_predict", *_NEUTRAL)


def to_chat_request(request: OllamaChat) -> ChatCompletionRequest:
    """A conversation as a chat completion request. Raises HTTPError, a 400 that names what is wrong."""
    messages = request.messages or []
    chat = ChatCompletionRequest(messages=_Conversation().convert(messages), tools=request.tools or None)
    chat.continue_final_message = chat.messages[-1]["role"] == "assistant" and "tool_calls" not in chat.messages[-1]
    return _with_settings(chat, request)


def prompt_to_chat_request(request: OllamaGenerate) -> ChatCompletionRequest:
    """A prompt as a conversation of one message, which the model's chat template renders."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    user = {"role": "user", "content": _with_images(request.prompt or "", request.images, "images")}
    return _with_settings(ChatCompletionRequest(messages=[*system, user]), request)


def to_completion_request(request: OllamaGenerate) -> CompletionRequest:
    """A prompt that no template renders."""
    if request.images:
        raise bad_field("images", "a raw prompt has no place for images.", "not_supported")
    prompt = f"{request.system}\n\n{request.prompt}" if request.system else request.prompt
    return _with_options(CompletionRequest(prompt=prompt), request)


def check_supported(request: OllamaGenerate) -> None:
    """Raise a 400 for what this server cannot do and would change the answer."""
    refused = {
        "suffix": "text between two others is not written here",
        "template": "templates are the operator's (--chat-template); send raw: true and the whole prompt",
        "context": "nothing is kept between requests; send the conversation to /api/chat",
    }
    for field, why in refused.items():
        if getattr(request, field):
            raise bad_field(field, f"{why}.", "not_supported")


def most_tokens(request: GenerationOptions) -> int | None:
    """How long the answer may be: `num_predict`; None for as long as it fits."""
    asked = _options(request).get("num_predict")
    return int(asked) if asked is not None and asked > 0 else None


def is_unload(request: GenerationOptions) -> bool:
    """Whether a model that is there without a request may go: `keep_alive` of zero seconds, in one of its many forms."""
    return request.keep_alive is not None and str(request.keep_alive).rstrip("hms") in ("0", "0.0")


# --- messages ---


class _Conversation:
    """Converts messages one after the other; a result belongs to the oldest call of its function that has none yet."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        self._num_calls = 0

    def convert(self, messages: list[Fields]) -> list[Fields]:
        return [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _message(self, message: Fields, path: str) -> Fields:
        role = one_of(message.get("role"), _ROLES, f"{path}.role")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise bad_field(f"{path}.content", "expected a string; images have a field of their own.")
        converted: Fields = {"role": role, "content": content or ""}
        if role == "tool":
            return converted | self._result_of(message)
        if message.get("images"):
            converted["content"] = _with_images(content or "", message["images"], f"{path}.images")
        if message.get("thinking"):
            converted["reasoning"] = string_field(message, "thinking", path)
        if message.get("tool_calls"):
            converted["tool_calls"] = self._calls(message["tool_calls"], f"{path}.tool_calls")
        return converted

    def _calls(self, calls: Any, path: str) -> list[Fields]:
        if not isinstance(calls, list):
            raise bad_field(path, "expected a list.")
        return [self._call(object_at(call, f"{path}[{index}]"), f"{path}[{index}]") for index, call in enumerate(calls)]

    def _call(self, call: Fields, path: str) -> Fields:
        function = object_at(call.get("function"), f"{path}.function")
        name = string_field(function, "name", f"{path}.function")
        arguments = object_at(function.get("arguments") or {}, f"{path}.function.arguments")
        self._num_calls += 1
        call_id = f"call_{self._num_calls}"
        self._open.append((name, call_id))
        text = json.dumps(arguments, ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}

    def _result_of(self, message: Fields) -> Fields:
        name = message.get("tool_name") or message.get("name")
        found = next((each for each in self._open if name in (None, each[0])), None)
        if found is None:
            return {"tool_call_id": "call_0"} | ({"name": name} if name else {})
        self._open.remove(found)
        return {"tool_call_id": found[1], "name": found[0]}


def _with_images(text: str, images: Any, path: str) -> Any:
    if not images:
        return text
    if not isinstance(images, list):
        raise bad_field(path, "expected a list of images as base64.")
    parts = [_image(image, f"{path}[{index}]") for index, image in enumerate(images)]
    return content_of([*parts, *([text] if text else [])])


def _image(image: Any, path: str) -> PlacedPart:
    if not isinstance(image, str) or "://" in image[:10]:
        raise bad_field(path, "expected the image's bytes as base64.")
    url = image if image.startswith("data:") else f"data:image/png;base64,{image}"  # the decoder looks what it is
    return PlacedPart({"type": "image_url", "image_url": {"url": url}}, path, path)


# --- settings ---


def _with_settings(chat: ChatCompletionRequest, request: GenerationOptions) -> ChatCompletionRequest:
    _with_options(chat, request)
    if request.logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    think = request.think
    if isinstance(think, str):
        if think not in _EFFORTS:
            raise bad_field("think", f"{think[:60]!r} is unknown; allowed: true, false, {', '.join(_EFFORTS)}.")
        chat.reasoning_effort = think
    if think is not None:
        thinks = think is not False
        chat.include_reasoning = thinks
        chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks}
    return chat


def _with_options(asked: RequestT, request: GenerationOptions) -> RequestT:
    """Set what both kinds of requests have."""
    options = _options(request)
    for option, field in _SAMPLING.items():
        if options.get(option) is not None:
            setattr(asked, field, options[option])
    asked.model = request.model
    asked.stream = request.stream is not False
    asked.return_timing = True
    asked.response_format = _format(request.format)
    return asked


def _options(request: GenerationOptions) -> Fields:
    """The options, with numbers where numbers belong. What says how a model is loaded (`num_ctx` …) is the operator's."""
    options = request.options or {}
    for name in _NUMBERS:
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise bad_field(f"options.{name}", f"{str(value)[:60]!r} is not a number.")
    for name in ("top_k", "seed", "num_predict"):
        if (value := options.get(name)) is not None and value != int(value):
            raise bad_field(f"options.{name}", f"{value} is not a whole number.")
    for name, neutral in _NEUTRAL.items():
        if (value := options.get(name)) is not None and value not in neutral:
            raise bad_request(f"options.{name}: {value} is not supported here.", f"options.{name}", "not_supported")
    stop = options.get("stop")
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise bad_field("options.stop", "expected a string or a list of strings.")
    return options | {name: int(options[name]) for name in ("top_k", "seed") if options.get(name) is not None}


def _format(wanted: str | Fields | None) -> ResponseFormat | None:
    if wanted is None or wanted == "":
        return None
    if is_dict(wanted):
        return ResponseFormat(type="json_schema", json_schema={"name": "answer", "schema": wanted})
    if wanted != "json":
        raise bad_field("format", f"{str(wanted)[:60]!r} is unknown; allowed: 'json', or a JSON schema.")
    return ResponseFormat(type="json_object")


LATEST = ":latest"


def served_name(state: ServerState, request: ModelFields) -> str:
    """The name under which the model is served. Raises HTTPError, a 404: it is not served."""
    name = request.model or request.name
    if name and name.endswith(LATEST) and name not in state.model_names and state.adapters.find(name) is None:
        name = name.removesuffix(LATEST)
    return state.resolve_model(name)
