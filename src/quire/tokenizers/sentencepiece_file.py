"""Tokenizers of a SentencePiece file that no configuration says more about. The library is sentencepiece, an optional package."""

from pathlib import Path
from typing import Any

from quire.errors import refusing
from quire.extras import import_optional
from quire.tokenizers.fast import read_chat_template, read_json
from quire.tokenizers.plain import PlainTokenizer
from quire.tokenizers.token_bytes import sentencepiece_table

MARK = "▁"


class SentencePieceTokenizer(PlainTokenizer):
    """A SentencePiece file alone: control pieces are special tokens, a text begins with the one that begins sequences.

    Raises:
        ConfigError: sentencepiece is not installed, or the file is broken.
    """

    def __init__(self, folder: Path, path: Path, chat_template: str | None = None) -> None:
        sentencepiece = import_optional(
            "sentencepiece",
            "transformers",
            "tokenizer",
            f"{path} is a SentencePiece file; reading it needs sentencepiece",
        )
        with refusing(RuntimeError, OSError, setting="tokenizer", what=f"cannot read {path}"):
            self._model: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        model = self._model
        ids = range(model.get_piece_size())
        control = {model.id_to_piece(token_id): token_id for token_id in ids if model.is_control(token_id)}
        unknown = {model.id_to_piece(model.unk_id()): model.unk_id()}
        special = {**control, **unknown}
        tokens = {model.id_to_piece(token_id): token_id for token_id in ids if token_id not in special.values()}
        config = read_json(folder / "tokenizer_config.json")
        self._adds_space = any(piece.startswith(MARK) for piece in model.encode("a", out_type=str)[:1])
        table = sentencepiece_table(self.id_to_token, special, "space" if self._adds_space else "")
        super().__init__(folder, tokens, special, table, config, read_chat_template(folder, config, chat_template))
        named = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        named["pad_token"] = model.pad_id()
        self.special_tokens = {name: model.id_to_piece(token_id) for name, token_id in named.items() if token_id >= 0}
        self.additional_special_tokens = [token for token in control if token not in self.special_tokens.values()]
        self.begin = [model.bos_id()] if model.bos_id() >= 0 else []

    def encode_text(self, text: str, is_first: bool) -> list[int]:
        """Token ids of a text without special tokens. Behind one, no space is added."""
        if is_first or not self._adds_space:
            return self._model.encode(text)
        ids: list[int] = self._model.encode("\n" + text)
        return ids[len(self._model.encode("\n")) :]
