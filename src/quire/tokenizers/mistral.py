"""Mistral's own tokenizers (tekken.json, tokenizer.model.v3 …), through mistral-common, an optional package.

It makes prompts of conversations itself, as token ids: no text that a client sends becomes a control token. There is no
chat template.
"""

import hashlib
import importlib
import re
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, RequestError
from quire.extras import install_command
from quire.tokenizers.content_format import ContentFormat, as_text
from quire.tokenizers.interface import Conversation
from quire.tokenizers.plain import PlainTokenizer
from quire.tokenizers.token_bytes import bytes_as_string, sentencepiece_table, string_bytes_table

_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")


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
        try:
            library: Any = importlib.import_module("mistral_common.tokens.tokenizers.mistral")
        except ImportError:
            raise ConfigError(
                f"{path} is read by mistral-common, which is not installed: {install_command('mistral')}",
                setting="tokenizer",
            ) from None
        try:
            self._library: Any = library.MistralTokenizer.from_file(str(path))
            inner: Any = self._library.instruct_tokenizer.tokenizer
        except Exception as error:  # whatever a broken file makes it raise
            raise ConfigError(f"mistral-common cannot read {path}: {error}", setting="tokenizer") from None
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
        """A conversation as the model's prompt; variables and formats of templates mean nothing here.

        Raises:
            RequestError: the conversation is not one that the model knows, or a template is given.
        """
        if chat_template is not None or documents:
            field = "documents" if chat_template is None else "chat_template"
            raise RequestError(f"{field}: Mistral's tokenizer makes prompts without a template", param=field)
        try:
            requests: Any = importlib.import_module("mistral_common.protocol.instruct.request")
            messages = [_message(message) for message in conversation]
            request = requests.ChatCompletionRequest.from_openai(
                messages=messages, tools=tools or None, continue_final_message=continue_final_message
            )
            prompt = self._library.encode_chat_completion(request)
        except Exception as error:  # the package's own exceptions, and those of its data classes
            raise RequestError(f"Mistral's tokenizer refuses this conversation: {error}", param="messages") from None
        return list(prompt.tokens) if tokenize else str(prompt.text)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """What the package knows of a message; ids of calls have nine characters."""
    message = as_text(message)
    known = {key: message[key] for key in _MESSAGE_KEYS if message.get(key)}
    if "tool_call_id" in known:
        known["tool_call_id"] = _call_id(str(known["tool_call_id"]))
    if "tool_calls" in known:
        known["tool_calls"] = [{**call, "id": _call_id(str(call.get("id")))} for call in known["tool_calls"]]
        known.setdefault("content", None)
    return {"content": "", **known}


def _call_id(given: str) -> str:
    return given if _CALL_ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]
