"""Tokenizers of byte strings and their ranks, as tiktoken writes them: `*.tiktoken`, `tiktoken.model`, and files called
tokenizer.model that hold such lines. The library is tiktoken, an optional package.

No file says how text is cut into words before it is encoded; the table here has it by the tokenizer's class.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, refusing
from quire.extras import import_optional
from quire.tokenizers.fast import SPECIAL_NAMES, read_chat_template, read_json, token_content
from quire.tokenizers.plain import PlainTokenizer
from quire.tokenizers.token_bytes import bytes_as_string, string_bytes_table

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_EDGE = r"[^\r\n\p{L}\p{N}]?"
_PATTERNS = {
    "QWenTokenizer": rf"{_WORDS}\p{{N}}|{_REST}",
    "ChatGLM4Tokenizer": rf"{_WORDS}\p{{N}}{{1,3}}|{_REST}",
    "TikTokenTokenizer": (
        rf"[\p{{Han}}]+|{_EDGE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_EDGE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}|{_REST}"
    ),
}
"""How words are cut, by `tokenizer_class`: Qwen 1, GLM-4, Kimi."""
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
_BEGIN = {"ChatGLM4Tokenizer": ("[gMASK]", "<sop>")}
"""Tokens that begin every text."""


def find_rank_file(folder: Path) -> Path | None:
    """The folder's file of ranks, if it has one."""
    found = [*sorted(folder.glob("*.tiktoken")), folder / "tiktoken.model", folder / "tokenizer.model"]
    return next((path for path in found if path.is_file() and _has_ranks(path)), None)


def _has_ranks(path: Path) -> bool:
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", file.readline(1 << 16)) is not None


class RankTokenizer(PlainTokenizer):
    """A tiktoken vocabulary with its side files.

    Raises:
        ConfigError: tiktoken is not installed, the file is broken, or it is not known how text is cut.
    """

    def __init__(self, folder: Path, path: Path, chat_template: str | None = None) -> None:
        tiktoken = import_optional(
            "tiktoken", "tiktoken", "tokenizer", f"{path} is a tiktoken vocabulary; reading it needs tiktoken"
        )
        config = read_json(folder / "tokenizer_config.json")
        ranks = _read_ranks(path)
        kind = str(config.get("tokenizer_class") or "")
        if kind not in _PATTERNS:
            raise ConfigError(
                f"{path} does not say how words are cut, and tokenizer_class {kind!r} is not known; known: "
                f"{', '.join(_PATTERNS)}. Convert it to a tokenizer.json.",
                setting="tokenizer",
            )
        special, hidden = _special_tokens(config, kind, len(ranks))
        tokens = {bytes_as_string(token): rank for token, rank in ranks.items()}
        template = read_chat_template(folder, config, chat_template)
        table = string_bytes_table(self.id_to_token, special, hidden)
        super().__init__(folder, tokens, special, table, config, template, hidden)
        given = {name: token_content(config.get(name)) for name in SPECIAL_NAMES}
        named = {name: token for name, token in given.items() if token is not None and token in special}
        if kind == "QWenTokenizer":
            named.setdefault("eos_token", _QWEN_SPECIAL[0])
        self.special_tokens = named
        shown = (token for token, token_id in special.items() if token_id in hidden)
        self.additional_special_tokens = [token for token in shown if token not in named.values()]
        self.begin = [special[token] for token in _BEGIN.get(kind, ()) if token in special]
        self._encoding = tiktoken.Encoding(
            folder.name, pat_str=_PATTERNS[kind], mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=len(ranks)
        )

    def encode_text(self, text: str, is_first: bool) -> list[int]:
        """Token ids of a text without special tokens."""
        return self._encoding.encode_ordinary(text)


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    with refusing(ValueError, binascii.Error, setting="tokenizer", what=f"cannot read {path}"):
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    if len(ranks) != len(set(ranks.values())) or max(ranks.values()) != len(ranks) - 1:
        raise ConfigError(f"cannot read {path}: ranks are not 0 to {len(ranks) - 1}", setting="tokenizer")
    return ranks


def _special_tokens(config: Mapping[str, Any], kind: str, first: int) -> tuple[dict[str, int], frozenset[int]]:
    """Tokens behind the ranks: those that the configuration lists, else the ones of the class; and which of them are hidden."""
    listed: dict[str, Mapping[str, Any]] = config.get("added_tokens_decoder") or {}
    found = {str(entry["content"]): int(token_id) for token_id, entry in listed.items()}
    if not found and kind == "QWenTokenizer":
        found = {token: first + index for index, token in enumerate(_QWEN_SPECIAL)}
    shown = {int(token_id) for token_id, entry in listed.items() if not entry.get("special", True)}
    return found, frozenset(set(found.values()) - shown)
