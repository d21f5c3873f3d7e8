"""Tokenizers without a tokenizer.json, through Transformers, which is imported only here and only then."""

import json
from pathlib import Path
from typing import Any, cast

from quire.errors import refusing
from quire.extras import import_optional
from quire.tokenizers.fast import read_chat_template, read_json
from quire.tokenizers.interface import NO_LIMIT, Tokenizer, reading
from quire.tokenizers.token_bytes import TokenBytes, build_token_bytes


class TransformersTokenizer(Tokenizer):
    """An `AutoTokenizer`.

    Raises:
        ConfigError: Transformers is not installed, or it cannot read the checkpoint.
    """

    is_fast = False

    def __init__(self, folder: Path, chat_template: str | None = None, use_fast: bool = True) -> None:
        transformers = import_optional(
            "transformers",
            "transformers",
            "tokenizer",
            f"{folder} has no tokenizer.json; reading its tokenizer needs Transformers",
        )
        # Whatever a broken checkpoint makes it raise.
        with refusing(Exception, setting="tokenizer", what=f"Transformers cannot read the tokenizer in {folder}"):
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), use_fast=use_fast, trust_remote_code=False, local_files_only=True
            )
        self.name_or_path = str(folder)
        self.model_max_length = min(int(self._tokenizer.model_max_length), NO_LIMIT)
        values: dict[str, Any] = self._tokenizer.special_tokens_map
        self.special_tokens = {name: str(token) for name, token in values.items() if isinstance(token, str)}
        lists = [cast("list[Any]", tokens) for tokens in values.values() if isinstance(tokens, list)]
        self.additional_special_tokens = [str(token) for tokens in lists for token in tokens]
        self.template = read_chat_template(folder, read_json(folder / "tokenizer_config.json"), chat_template)
        self.special_ids = frozenset(map(int, self._tokenizer.all_special_ids))
        self.token_bytes: TokenBytes | None = self._bytes_of_backend()

    def _bytes_of_backend(self) -> TokenBytes | None:
        """The table of bytes, where Transformers converted the files into a tokenizer whose decoder tells."""
        decoder: Any = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        if decoder is None:
            return None
        tokens: dict[int, Any] = self._tokenizer.added_tokens_decoder
        added = {int(token_id): str(token.content) for token_id, token in tokens.items()}
        return build_token_bytes(json.loads(decoder.__getstate__()), self.id_to_token, added, self.special_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        with reading(text, most=self.max_text):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_pair(self, first: str, second: str, max_length: int | None = None) -> tuple[list[int], list[int]]:
        """Two texts as one prompt."""
        with reading(first, second, most=self.max_text):
            joined = self._tokenizer(
                first, second, truncation=max_length is not None, max_length=max_length, return_token_type_ids=True
            )
        return list(joined["input_ids"]), list(joined["token_type_ids"])

    def decode_tokens(
        self, token_ids: list[int], skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> str:
        """The library's text."""
        options = {} if spaces_between_special_tokens else {"spaces_between_special_tokens": False}
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False, **options
            )
        )

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's string."""
        return self.get_vocab().get(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's string of an id."""
        if not 0 <= token_id < len(self):
            return None
        return self._tokenizer.convert_ids_to_tokens(token_id)

    def get_vocab(self) -> dict[str, int]:
        """Every token, added ones included."""
        return dict(self._tokenizer.get_vocab())

    def get_added_vocab(self) -> dict[str, int]:
        """Added tokens."""
        return dict(self._tokenizer.get_added_vocab())

    @property
    def vocab_size(self) -> int:
        """Tokens without the added ones."""
        return int(self._tokenizer.vocab_size)

    def __len__(self) -> int:
        return len(self._tokenizer)
