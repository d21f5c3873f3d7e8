"""Mistral's own tokenizers (tekken.json, tokenizer.model.v3 …), through mistral-common, an optional package.

It makes prompts of conversations itself, as token ids: no text that a client sends becomes a control token. There is no
chat template.
"""

import base64
import functools
import hashlib
import importlib
import io
import re
import wave
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, RequestError, refusing
from quire.extras import import_optional
from quire.guards import is_sequence
from quire.tokenizers.content_format import ContentFormat, as_text
from quire.tokenizers.interface import Conversation
from quire.tokenizers.plain import PlainTokenizer
from quire.tokenizers.token_bytes import bytes_as_string, sentencepiece_table, string_bytes_table

_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
_AUDIO = "[AUDIO]"
_SILENCE_S = 0.1


@functools.cache
def _silence() -> str:
    """A sound that stands in the place of each in a conversation: base64 of a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(bytes(2 * int(16000 * _SILENCE_S)))
    return base64.b64encode(file.getvalue()).decode()


def find_mistral_file(folder: Path) -> Path | None:
    """The folder's file of Mistral's, if it has one."""
    found = [folder / "tekken.json", *sorted(folder.glob("*.model.v*"), reverse=True)]
    return next((path for path in found if path.is_file()), None)


class MistralTokenizer(PlainTokenizer):
    """A tokenizer of mistral-common.

    Raises:
        ConfigError: the package is not installed, or it cannot read the file.
    """

    writes_tokens = True

    def __init__(self, folder: Path, path: Path, chat_template: str | None = None) -> None:
        if chat_template is not None:
            raise ConfigError(
                "chat_template: Mistral's tokenizer makes prompts without a template; leave it out, or set "
                "tokenizer_mode to hf",
                setting="chat_template",
            )
        library = import_optional(
            "mistral_common.tokens.tokenizers.mistral",
            "mistral",
            "tokenizer",
            f"{path} is read by mistral-common, which is not installed",
        )
        # Whatever a broken file makes it raise.
        with refusing(Exception, setting="tokenizer", what=f"mistral-common cannot read {path}"):
            self._library: Any = library.MistralTokenizer.from_file(str(path))
            inner: Any = self._library.instruct_tokenizer.tokenizer
        self._inner = inner
        special = {inner.id_to_piece(token_id): int(token_id) for token_id in sorted(inner.special_ids)}
        hidden = frozenset(special.values())
        others = [token_id for token_id in range(inner.n_words) if token_id not in hidden]
        if hasattr(inner, "id_to_byte_piece"):
            tokens = {bytes_as_string(inner.id_to_byte_piece(token_id)): token_id for token_id in others}
            table = string_bytes_table(self.id_to_token, special, hidden)
        else:
            tokens = {inner.id_to_piece(token_id): token_id for token_id in others}
            table = sentencepiece_table(self.id_to_token, special, "space")
        super().__init__(folder, tokens, special, table, {}, None, parses_special=False)
        named = {"bos_token": inner.bos_id, "eos_token": inner.eos_id, "unk_token": inner.unk_id}
        self.special_tokens = {name: inner.id_to_piece(token_id) for name, token_id in named.items()}
        self.additional_special_tokens = [token for token in special if token not in self.special_tokens.values()]
        self.begin = [inner.bos_id]

    def encode_text(self, text: str, is_first: bool) -> list[int]:
        """Token ids of a text without special tokens."""
        return self._inner.encode(text, bos=False, eos=False)

    def apply_chat_template(
        self,
        conversation: Conversation,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        content_format: ContentFormat = "auto",
        **kwargs: Any,
    ) -> str | list[int]:
        """A conversation as the model's prompt, in which each sound is one marker; variables and formats of templates mean
        nothing here.

        Raises:
            RequestError: the conversation is not one that the model knows, or a template is given.
        """
        if chat_template is not None or documents:
            field = "documents" if chat_template is None else "chat_template"
            raise RequestError(f"{field}: Mistral's tokenizer makes prompts without a template", param=field)
        # The package's own exceptions, and those of its data classes.
        with refusing(Exception, param="messages", what="Mistral's tokenizer refuses this conversation"):
            requests: Any = importlib.import_module("mistral_common.protocol.instruct.request")
            messages = [_message(message) for message in conversation]
            request = requests.ChatCompletionRequest.from_openai(
                messages=messages, tools=tools or None, continue_final_message=continue_final_message
            )
            prompt = self._library.encode_chat_completion(request)
        return self._with_markers(list(prompt.tokens)) if tokenize else str(prompt.text)

    def _with_markers(self, token_ids: list[int]) -> list[int]:
        """The tokens, with one in the place of those of each sound."""
        marker = self.token_to_id(_AUDIO)
        return [
            token
            for index, token in enumerate(token_ids)
            if token != marker or token_ids[index - 1 : index] != [marker]
        ]


def _parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with sounds, in the package's words."""
    parts: Any = message.get("content")
    if not is_sequence(parts) or all(part.get("type") not in ("audio", "image") for part in parts):
        return message
    if any(part.get("type") == "image" for part in parts):
        raise ValueError("it has an image, for which Mistral's tokenizer is not used: set tokenizer_mode to hf")
    sound = {"type": "input_audio", "input_audio": {"data": _silence(), "format": "wav"}}
    return {**message, "content": [sound if part.get("type") == "audio" else part for part in parts]}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """What the package knows of a message; ids of calls have nine characters."""
    message = as_text(_parts(message))
    known = {key: message[key] for key in _MESSAGE_KEYS if message.get(key)}
    if "tool_call_id" in known:
        known["tool_call_id"] = _call_id(str(known["tool_call_id"]))
    if "tool_calls" in known:
        known["tool_calls"] = [{**call, "id": _call_id(str(call.get("id")))} for call in known["tool_calls"]]
        known.setdefault("content", None)
    return {"content": "", **known}


def _call_id(given: str) -> str:
    return given if _CALL_ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]
