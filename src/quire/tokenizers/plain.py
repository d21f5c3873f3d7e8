"""What tokenizers share whose library knows ordinary text alone: special tokens and what frames a text are kept here.

Knows token strings, their bytes, and the side files. Knows no library.
"""

import abc
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.tokenizers.chat_template import ChatTemplate
from quire.tokenizers.fast import read_max_length
from quire.tokenizers.interface import Tokenizer, reading
from quire.tokenizers.token_bytes import TokenBytes


class PlainTokenizer(Tokenizer):
    """A tokenizer that encodes text between special tokens, and decodes through the table of bytes.

    Args:
        tokens: the vocabulary's strings, by id; special tokens are not among them.
        special: strings and ids of tokens that are written as themselves.
        token_bytes: the bytes of both.
        config: tokenizer_config.json.
        hidden: ids that `skip_special_tokens` leaves out; None: those of all of `special`.
        parses_special: special tokens in a text are such tokens; otherwise they are text like any other.
    """

    is_fast = False

    def __init__(
        self,
        folder: Path,
        tokens: Mapping[str, int],
        special: Mapping[str, int],
        token_bytes: TokenBytes,
        config: Mapping[str, Any],
        template: ChatTemplate | None,
        hidden: frozenset[int] | None = None,
        parses_special: bool = True,
    ) -> None:
        self.name_or_path = str(folder)
        self.model_max_length = read_max_length(config)
        self.token_bytes: TokenBytes | None = token_bytes
        self.template = template
        self.begin: list[int] = []
        self._ids = {**tokens, **special}
        self._strings = {token_id: token for token, token_id in self._ids.items()}
        self._added = dict(special)
        self.special_ids = frozenset(special.values()) if hidden is None else hidden
        longest_first = sorted(special, key=len, reverse=True) if parses_special else []
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @abc.abstractmethod
    def encode_text(self, text: str, is_first: bool) -> list[int]:
        """Token ids of a text without special tokens; `is_first`: nothing comes before it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ids, at = list(self.begin) if add_special_tokens else [], 0
        with reading(text, most=self.max_text):
            text.encode()
            for mark in self._marks.finditer(text):
                if mark.start() > at:
                    ids += self.encode_text(text[at : mark.start()], at == 0)
                ids.append(self._added[mark.group()])
                at = mark.end()
            if at < len(text):
                ids += self.encode_text(text[at:], at == 0)
        return ids

    def encode_pair(self, first: str, second: str, max_length: int | None = None) -> tuple[list[int], list[int]]:
        """Two texts, one behind the other, each framed as it would be alone."""
        parts = [self.encode(first), self.encode(second)]
        while max_length is not None and sum(map(len, parts)) > max_length:
            max(parts, key=len).pop()
        return [*parts[0], *parts[1]], [0] * len(parts[0]) + [1] * len(parts[1])

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's string."""
        return self._ids.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's string of an id."""
        return self._strings.get(token_id)

    def get_vocab(self) -> dict[str, int]:
        """Every token, special ones included."""
        return dict(self._ids)

    def get_added_vocab(self) -> dict[str, int]:
        """Special tokens."""
        return dict(self._added)

    @property
    def vocab_size(self) -> int:
        """Tokens without the special ones."""
        return len(self._ids) - len(self._added)
