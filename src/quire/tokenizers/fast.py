"""Tokenizers from a tokenizer.json, through the `tokenizers` library and nothing else (no Transformers import).

Reads tokenizer_config.json, special_tokens_map.json and the chat template files beside it for special tokens and templates.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from quire.config.files import read_json_object_if_there
from quire.errors import refusing
from quire.tokenizers.chat_template import ChatTemplate, read_template
from quire.tokenizers.interface import NO_LIMIT, Tokenizer, reading
from quire.tokenizers.token_bytes import TokenBytes, build_token_bytes

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CLASSES_THAT_ADD_BOS = ("Llama", "CodeLlama", "Gemma", "Cohere")
"""Tokenizer classes whose `add_bos_token`/`add_eos_token` settings overrule tokenizer.json's post-processor."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file does not exist. Raises ConfigError: it is not one."""
    return read_json_object_if_there(str(path), setting="tokenizer")


def read_chat_template(folder: Path, config: Mapping[str, Any], override: str | None) -> ChatTemplate | None:
    """The template to use: the setting `chat_template` (a file or a source), chat_template.jinja (with
    additional_chat_templates/*.jinja), chat_template.json, or tokenizer_config.json's `chat_template`."""
    if override:
        return read_template(override)
    sources: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        entries = cast("list[dict[str, str]]", given)
        sources.update({entry["name"]: entry["template"] for entry in entries})
    in_json = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        sources["default"] = in_json
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text("utf-8")
    return ChatTemplate(sources) if sources else None


def token_content(token: Any) -> str | None:
    """A token as configuration files write it: a string, or an object with `content`."""
    if isinstance(token, str):
        return token
    if isinstance(token, Mapping):
        return cast("Mapping[str, Any]", token).get("content")
    return None


def read_max_length(config: Mapping[str, Any]) -> int:
    """The limit that tokenizer_config.json states."""
    limit = config.get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and limit < NO_LIMIT else NO_LIMIT


class FastTokenizer(Tokenizer):
    """A tokenizer.json with its side files.

    Args:
        folder: where they lie.
        chat_template: overrides the checkpoint's template: a file's path or a source.

    Raises:
        ConfigError: a file is missing or broken.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        with refusing(Exception, setting="tokenizer", what=f"cannot read {path}"):  # the library raises bare Exception
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        config = read_json(folder / "tokenizer_config.json")
        self.name_or_path = str(folder)
        self.model_max_length = read_max_length(config)
        self._read_special_tokens(folder, config)
        self._overrule_post_processor(config)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.template = read_chat_template(folder, config, chat_template)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {int(token_id): str(token.content) for token_id, token in added.items()}
        self.special_ids = frozenset(int(token_id) for token_id, token in added.items() if token.special)
        self.token_bytes: TokenBytes | None = build_token_bytes(
            self._decoder_description(), self.id_to_token, self._added, self.special_ids
        )

    # --- reading ---

    def _read_special_tokens(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Named special tokens; those that tokenizer.json does not mark as special are added to it as such."""
        import tokenizers

        merged = {**read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
        named = {name: token_content(merged.get(name)) for name in SPECIAL_NAMES}
        self.special_tokens = {name: content for name, content in named.items() if content}
        extra: Any = merged.get("extra_special_tokens")
        if isinstance(extra, Mapping):
            by_name = cast("Mapping[str, Any]", extra)
            self.special_tokens.update({name: str(token_content(token)) for name, token in by_name.items()})
            extra = []
        further: list[Any] = [*(merged.get("additional_special_tokens") or []), *(extra or [])]
        self.additional_special_tokens = [content for token in further if (content := token_content(token))]

        known = {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()}
        listed: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
        for token_id in sorted(listed, key=int):
            entry = listed[token_id]
            if entry["content"] not in known:
                options = {
                    name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")
                }
                token = tokenizers.AddedToken(entry["content"], normalized=bool(entry.get("normalized")), **options)
                add = self._tokenizer.add_special_tokens if options["special"] else self._tokenizer.add_tokens
                add([token])
                known[entry["content"]] = token
        wanted = [*self.special_tokens.values(), *self.additional_special_tokens]
        missing = [content for content in dict.fromkeys(wanted) if content not in known]
        if missing:
            tokens = [tokenizers.AddedToken(content, normalized=False, special=True) for content in missing]
            self._tokenizer.add_special_tokens(tokens)

    def _overrule_post_processor(self, config: Mapping[str, Any]) -> None:
        """`add_bos_token` and `add_eos_token`, for the classes where those decide."""
        if not str(config.get("tokenizer_class", "")).startswith(_CLASSES_THAT_ADD_BOS):
            return
        if "add_bos_token" not in config and "add_eos_token" not in config:
            return
        import tokenizers.processors

        now: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids
        bos, eos = self.bos_token_id, self.eos_token_id
        add_bos = bool(config.get("add_bos_token", bos in now)) and bos is not None
        add_eos = bool(config.get("add_eos_token", eos in now)) and eos is not None
        if (add_bos, add_eos) == (bos in now, eos in now):
            return
        template = [f"{self.bos_token}:0"] * add_bos + ["$A:0"] + [f"{self.eos_token}:0"] * add_eos
        special = [(self.bos_token, bos)] * add_bos + [(self.eos_token, eos)] * add_eos
        self._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[(str(token), int(token_id or 0)) for token, token_id in special]
        )

    def _decoder_description(self) -> dict[str, Any] | None:
        decoder = self._tokenizer.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    # --- the interface ---

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, in parallel. The library's call for one text stops all other threads while it works."""
        with reading(*texts, most=self.max_text):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]

    def encode_spans(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and the library's offsets."""
        with reading(text, most=self.max_text):
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.offsets

    def encode_pair(self, first: str, second: str, max_length: int | None = None) -> tuple[list[int], list[int]]:
        """Two texts as one prompt."""
        with reading(first, second, most=self.max_text):
            parts = self._tokenizer.encode_batch_fast([first, second], add_special_tokens=False)
        if max_length is not None:
            room = max(0, max_length - self._tokenizer.num_special_tokens_to_add(True))
            for part, length in zip(parts, _fit_pair(len(parts[0]), len(parts[1]), room), strict=True):
                part.truncate(length)
        joined = self._tokenizer.post_process(*parts, add_special_tokens=True)
        return joined.ids, joined.type_ids

    def decode_tokens(
        self, token_ids: list[int], skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> str:
        """The library's text."""
        if skip_special_tokens or spaces_between_special_tokens:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._decode_without_spaces_between_added(token_ids)

    def _decode_without_spaces_between_added(self, ids: list[int]) -> str:
        """Added tokens that follow one another have no space between them."""
        text, after_added = "", False
        plain: list[int] = []
        for token_id in [*ids, None]:
            if token_id is not None and token_id not in self._added:
                plain.append(token_id)
                continue
            if plain:
                text += (" " if text else "") + self._tokenizer.decode(plain, skip_special_tokens=False)
                plain, after_added = [], False
            if token_id is not None:
                text += ("" if after_added or not text else " ") + self._added[token_id]
                after_added = True
        return text

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's string."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's string of an id."""
        return self._tokenizer.id_to_token(token_id) if token_id >= 0 else None

    def get_vocab(self) -> dict[str, int]:
        """Every token, added ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Added tokens."""
        return {content: token_id for token_id, content in self._added.items()}

    @property
    def vocab_size(self) -> int:
        """Tokens without the added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


def _fit_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts after the longer one was cut, token by token, until both fit."""
    longer, shorter = max(first, second), min(first, second)
    if longer + shorter > room:
        longer = max(room - shorter, (room + 1) // 2)
        shorter = min(shorter, room - longer)
    return (longer, shorter) if first > second else (shorter, longer)
