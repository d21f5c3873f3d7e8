"""From a request's prompt or messages to token ids; messages become the plain dicts that a chat template reads.

Tokenizes and renders what is long in a thread: it would hold up every stream for as long as it takes.
Knows the tokenizer's three verbs (encode, decode, apply a chat template). Knows nothing of sampling.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from quire.config import limits
from quire.engine.input_processor import InputProcessor, TokenizedPrompt, check_in_vocabulary
from quire.entrypoints import conversations, media_parts
from quire.entrypoints.http.admission import encode_text
from quire.entrypoints.http.errors import bad_field, bad_request
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.media_parts import MediaMessages
from quire.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, PromptItem, TokenizeRequest
from quire.errors import ConfigError, RequestError
from quire.media import IMAGE
from quire.multimodal.given_embeds import decode_embeds
from quire.request import TokenIds, token_array
from quire.tokenizers.interface import Tokenizer, check_template_variables

DEFAULT_SETTINGS = ServerSettings()


def normalize_messages(
    messages: list[dict[str, Any]], field: str = "messages", keep_parts: bool = False
) -> list[dict[str, Any]]:
    """Messages ready for a template, as `conversations.normalize_messages` gives them.
    Raises HTTPError or RequestError, a 400 whose `param` is the path of what is wrong."""
    if not messages:
        raise bad_field(field, "at least one message is needed.")
    if len(messages) > limits.MAX_CHAT_MESSAGES:
        raise bad_field(field, f"{len(messages)} messages; at most {limits.MAX_CHAT_MESSAGES}.")
    return conversations.normalize_messages(messages, field, keep_parts=keep_parts)


def content_text(message: dict[str, Any]) -> str:
    """The text of a message that has been checked."""
    (normal,) = normalize_messages([message])
    return str(normal["content"] or "")


INLINE_CHARACTERS = 16_384
"""Texts up to here are worked on in the event loop (about 2 ms on one Zen 3 core); a hop to a thread costs 0.1 ms."""

Parameters = ParamSpec("Parameters")
ResultT = TypeVar("ResultT")


async def run_sized(size: int, function: Callable[Parameters, ResultT], *args: Any, **kwargs: Any) -> ResultT:
    """Call `function` here when its input is short, in a thread when it is long."""
    if size <= INLINE_CHARACTERS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def require_tokenizer(tokenizer: Tokenizer | None, field: str) -> Tokenizer:
    """The tokenizer, or a 400 where the server runs without one."""
    if tokenizer is None:
        raise bad_field(field, "this server has no tokenizer (--skip-tokenizer-init); send token ids.")
    return tokenizer


def listed(given: str | Sequence[PromptItem] | None, field: str, what: str) -> list[Any]:
    """A text, texts, token ids or lists of token ids, as a list of prompts."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_field(field, "the list is empty.")
    items = [given] if isinstance(given[0], int) else list(given)
    if len(items) > limits.MAX_PROMPTS:
        raise bad_field(field, f"{len(items)} {what}; at most {limits.MAX_PROMPTS} in one request.")
    return items


async def embedded_prompts(state: ServerState, request: CompletionRequest) -> list[TokenizedPrompt]:
    """The prompts that a completion request gives as embeddings: base64 of safetensors, one text a prompt."""
    if not request.prompt_embeds:
        return []
    texts = [request.prompt_embeds] if isinstance(request.prompt_embeds, str) else request.prompt_embeds
    if len(texts) > limits.MAX_PROMPTS:
        raise bad_field("prompt_embeds", f"{len(texts)} prompts; at most {limits.MAX_PROMPTS} in one request.")
    if request.echo:
        raise bad_field("echo", "a prompt of embeddings has no text that could be echoed.")
    arrays = [await run_sized(len(text), decode_embeds, text) for text in texts]
    return [state.engine.input_processor.embedded(array) for array in arrays]


async def completion_prompts(state: ServerState, request: CompletionRequest, room: int) -> list[TokenizedPrompt]:
    """The prompts of a completion request: a text, texts, token ids, or lists of token ids; an encoder reads them where the
    model has one beside its decoder. `room`: how many tokens of each `truncate_prompt_tokens=-1` keeps.
    Raises RequestError: the encoder reads no text."""
    if request.prompt is None:
        raise bad_field("prompt", "this field is required.", "missing_field")
    items, tokenizer = listed(request.prompt, "prompt", "prompts"), state.engine.get_tokenizer()
    vocab_size, processor = state.engine.tokenizer_source.num_tokens(), input_processor(state)
    prompts = [await _completion_prompt(item, request, tokenizer, vocab_size, room) for item in items]
    if processor is None or processor.halves is None:
        return prompts
    return [processor.tokenize({"prompt_token_ids": prompt.token_ids}) for prompt in prompts]


async def _completion_prompt(
    item: str | int | list[int], request: CompletionRequest, tokenizer: Tokenizer | None, vocab_size: int, room: int
) -> TokenizedPrompt:
    if isinstance(item, int):
        raise bad_field("prompt", "a list mixes token ids with texts or lists.")
    if isinstance(item, str):
        special = request.add_special_tokens is not False
        prompt = TokenizedPrompt(await encode_text(require_tokenizer(tokenizer, "prompt"), item, special), item)
        if not prompt.token_ids:
            raise bad_field("prompt", "the text is empty, and has no tokens.")
    else:
        array = check_token_ids(item, vocab_size, "prompt")
        text = tokenizer.decode(item) if request.echo and tokenizer is not None else None
        prompt = TokenizedPrompt(item, text, array=array)
    keep = room if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens
    return _truncated(prompt, keep, request.truncation_side, tokenizer, bool(request.echo))


def check_token_ids(token_ids: list[int], vocab_size: int, field: str) -> TokenIds:
    """Token ids of the model's vocabulary, at least one, as an array. Raises HTTPError, a 400, if they are not."""
    if not token_ids:
        raise bad_field(field, "the list of token ids is empty.")
    try:
        array = token_array(token_ids)
        check_in_vocabulary(array, vocab_size, field)
    except TypeError:
        raise bad_field(field, "a list mixes token ids with texts or lists.") from None
    except (OverflowError, RequestError):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        shown = str(wrong) if abs(wrong) < 1 << 64 else "a huge number"
        raise bad_field(field, f"token id {shown} is out of vocabulary (0 to {vocab_size - 1}).") from None
    return array


def _truncated(
    prompt: TokenizedPrompt, keep: int | None, side: str | None, tokenizer: Tokenizer | None, need_text: bool
) -> TokenizedPrompt:
    if keep is None:
        return prompt
    if keep < 1:
        raise bad_field("truncate_prompt_tokens", f"{keep} is out of range; -1, or at least 1.")
    if len(prompt.token_ids) <= keep:
        return prompt
    if prompt.media:
        raise bad_field("truncate_prompt_tokens", "a prompt with media cannot be truncated.")
    kept = prompt.token_ids[:keep] if side == "right" else prompt.token_ids[-keep:]
    return TokenizedPrompt(kept, tokenizer.decode(kept) if need_text and tokenizer is not None else None)


async def chat_prompt(
    request: ChatCompletionRequest,
    tokenizer: Tokenizer | None,
    reserve: int | None,
    max_model_len: int,
    settings: ServerSettings = DEFAULT_SETTINGS,
    processor: InputProcessor | None = None,
) -> TokenizedPrompt:
    """The prompt that the chat template makes of a request's messages.

    Args:
        reserve: tokens asked for, which `truncate_prompt_tokens=-1` keeps free.
        settings: what the operator has chosen for templates.
        processor: reads images, if the model does.
    """
    leaves_tools_out = settings.exclude_tools_when_tool_choice_none
    prompt = await render_chat(
        request,
        request.messages,
        require_tokenizer(tokenizer, "messages"),
        template_variables(request, settings),
        request.add_generation_prompt,
        tools=None if request.tool_choice == "none" and leaves_tools_out else request.tools,
        documents=request.documents,
        processor=processor,
    )
    keep = request.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, max_model_len - (reserve or 1))
    return _truncated(prompt, keep, request.truncation_side, tokenizer, need_text=False)


async def count_prompt_tokens(state: ServerState, request: ChatCompletionRequest) -> int:
    """How many tokens the prompt of a request has."""
    limit = state.engine.config.model.max_model_len
    tokenizer, processor = state.engine.get_tokenizer(), input_processor(state)
    return len((await chat_prompt(request, tokenizer, None, limit, state.settings, processor)).token_ids)


def input_processor(state: ServerState) -> InputProcessor | None:
    """What reads a prompt's images, or its other half; None for an engine of tests that has none."""
    return getattr(state.engine, "input_processor", None)


async def hold_media(state: ServerState, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with media in the place of their URLs, so that a prompt which is made several times fetches them once."""
    processor = input_processor(state)
    if processor is None or processor.media is None or not (markers := processor.markers):
        return messages
    taken = await asyncio.to_thread(MediaMessages, messages, markers)
    processor.media.check_counts(taken.count())
    items = await taken.read_async(processor.media.source)
    return media_parts.hold_media(messages, taken.given, items) if items else messages


def template_variables(request: ChatCompletionRequest, settings: ServerSettings) -> dict[str, Any]:
    """The template's variables: the request's, else the operator's. A `reasoning_effort` turns thinking on, or off (`none`)."""
    asked, effort = request.chat_template_kwargs or {}, request.reasoning_effort
    kwargs = dict(settings.default_chat_template_kwargs)
    if effort is not None:
        kwargs["reasoning_effort"] = settings.reasoning_effort_map.get(effort, effort)
        kwargs["enable_thinking"] = kwargs["reasoning_effort"] != "none"
    return kwargs | asked


async def tokenize_prompt(
    request: TokenizeRequest,
    tokenizer: Tokenizer | None,
    template_kwargs: dict[str, Any],
    processor: InputProcessor | None = None,
) -> list[int]:
    """The token ids of a `/tokenize` request; `template_kwargs` are the operator's, and the processor reads images."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "give either prompt or messages.")
    if request.messages is None:
        text = request.prompt or ""
        special = request.add_special_tokens is not False
        return await encode_text(require_tokenizer(tokenizer, "prompt"), text, special)
    prompt = await render_chat(
        request,
        request.messages,
        require_tokenizer(tokenizer, "messages"),
        template_kwargs | (request.chat_template_kwargs or {}),
        request.add_generation_prompt,
        tools=request.tools,
        documents=request.documents,
        processor=processor,
    )
    return prompt.token_ids


class TemplateFields(Protocol):
    """What the requests that bring a conversation have in common."""

    chat_template: str | None
    continue_final_message: bool | None
    add_special_tokens: bool | None


async def render_chat(
    request: TemplateFields,
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    template_kwargs: dict[str, Any],
    add_generation_prompt: bool | None,
    *,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    processor: InputProcessor | None = None,
) -> TokenizedPrompt:
    """Render the messages through the chat template and tokenize the result; images are read by the processor."""
    continue_final_message = bool(request.continue_final_message)
    if continue_final_message and add_generation_prompt:
        raise bad_field("continue_final_message", "cannot be set together with add_generation_prompt.")
    markers = None if processor is None else processor.markers
    writes_tokens = bool(getattr(tokenizer, "writes_tokens", False))
    taken = await asyncio.to_thread(MediaMessages, messages, markers, is_text=not writes_tokens) if markers else None
    conversation = normalize_messages(messages if taken is None else taken.messages, keep_parts=True)
    if continue_final_message and conversation[-1]["role"] != "assistant":
        raise bad_field("continue_final_message", "the last message must be the assistant's.")
    generation_prompt = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    options = {
        "tools": tools,
        "documents": documents,
        "chat_template": request.chat_template,
        "add_generation_prompt": generation_prompt,
        "continue_final_message": continue_final_message,
    }
    size = sum(_size(message.get("content")) for message in conversation)

    def render() -> Any:
        try:
            check_template_variables(template_kwargs)
            return tokenizer.apply_chat_template(conversation, tokenize=writes_tokens, **options, **template_kwargs)
        except ConfigError as error:  # a template that does not compile; the operator's own was compiled at start
            raise bad_request(str(error), "chat_template") from None

    rendered = await run_sized(size, render)
    if taken is not None and processor is not None:
        kwargs, io = (getattr(request, name, None) for name in ("mm_processor_kwargs", "media_io_kwargs"))
        return await _with_media(taken, rendered, processor, bool(request.add_special_tokens), kwargs, io)
    if writes_tokens:
        return TokenizedPrompt(rendered)
    if processor is not None and processor.halves is not None:
        return await run_sized(len(rendered), processor.tokenize, rendered)
    return TokenizedPrompt(await encode_text(tokenizer, rendered, bool(request.add_special_tokens)), rendered)


async def untemplated(messages: list[dict[str, Any]], processor: InputProcessor) -> TokenizedPrompt:
    """The prompt of a model that reads a text or an image by itself: what the messages say, without a template."""
    taken = await asyncio.to_thread(MediaMessages, messages, {IMAGE: _NO_MARKER})
    said = [message.get("content") or "" for message in normalize_messages(taken.messages, keep_parts=True)]
    parts = [part for content in said for part in ([{"text": content}] if isinstance(content, str) else content)]
    text = "\n".join(str(part.get("text", "")) for part in parts).replace(_NO_MARKER, "").strip()
    if taken.given and text:
        raise bad_field("messages", "a prompt of this model is a text or an image: leave one of them out.")
    if taken.given:
        return await _with_media(taken, [], processor, True, None)
    return TokenizedPrompt(await encode_text(processor.require_tokenizer(), text, True), text)


_NO_MARKER = "\ue000image\ue001"


async def _with_media(
    taken: MediaMessages,
    rendered: str | list[int],
    processor: InputProcessor,
    special: bool,
    options: dict[str, Any] | None,
    io: Any = None,
) -> TokenizedPrompt:
    """The prompt with its images, videos and sounds, which are read and processed by threads of their own."""
    media = processor.media
    assert media is not None
    media.check_counts(taken.count())
    items = await taken.read_async(media.source, io)
    work = media.source.run(conversations.with_media, taken, items, rendered, processor, special, options)
    return await asyncio.wrap_future(work)


def _size(content: str | list[dict[str, str]] | None) -> int:
    return sum(len(part["text"]) for part in content) if isinstance(content, list) else len(content or "")
