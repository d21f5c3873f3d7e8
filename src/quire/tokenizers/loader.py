"""Which tokenizer a folder holds, and how to open it."""

from pathlib import Path

from quire.config.gguf.folder import NO_TOKENIZER
from quire.errors import ConfigError
from quire.tokenizers.fast import FastTokenizer, read_json
from quire.tokenizers.interface import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",
)
_PATTERNS = ("*.tiktoken", "*.model.v*")
"""Any of these means that the folder has a tokenizer."""

TOKENIZER_MODES = ("auto", "hf", "slow", "mistral")


def has_tokenizer(path: str) -> bool:
    """Whether the folder holds any tokenizer file."""
    folder = Path(path)
    return any((folder / name).is_file() for name in TOKENIZER_FILES) or any(
        found for pattern in _PATTERNS for found in folder.glob(pattern)
    )


def get_tokenizer(path: str, mode: str = "auto", *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer in a folder.

    Args:
        mode: `auto` takes tokenizer.json if there is one, else the library that the files are made for; `hf` tokenizer.json
            or Transformers; `slow` Transformers' Python tokenizer; `mistral` Mistral's own, mistral-common.
        chat_template: overrides the checkpoint's chat template: a file's path or a source.

    Raises:
        ConfigError: an unknown mode, no tokenizer files, or broken ones.
    """
    if mode not in TOKENIZER_MODES:
        allowed = ", ".join(TOKENIZER_MODES)
        raise ConfigError(f"tokenizer_mode is {mode!r}; it may be {allowed}", setting="tokenizer_mode")
    folder = Path(path)
    if not has_tokenizer(path):
        if (folder / NO_TOKENIZER).is_file():
            raise ConfigError((folder / NO_TOKENIZER).read_text("utf-8"), setting="tokenizer")
        raise ConfigError(
            f"{path} has no tokenizer files (looked for {', '.join(TOKENIZER_FILES)}); set `tokenizer` to a folder that "
            "has, or pass token ids and set skip_tokenizer_init",
            setting="tokenizer",
        )
    if mode == "mistral":
        return _mistral(folder, chat_template)
    if mode != "slow" and (folder / "tokenizer.json").is_file():
        return FastTokenizer(folder, chat_template)
    if mode == "auto" and (own := _by_file(folder, chat_template)) is not None:
        return own
    from quire.tokenizers.transformers_fallback import TransformersTokenizer

    return TransformersTokenizer(folder, chat_template, use_fast=mode != "slow")


def _mistral(folder: Path, chat_template: str | None) -> Tokenizer:
    from quire.tokenizers.mistral import MistralTokenizer, find_mistral_file

    path = find_mistral_file(folder) or folder / "tokenizer.model"
    if not path.is_file():
        raise ConfigError(
            f"tokenizer_mode is 'mistral', and {folder} has neither tekken.json nor a tokenizer.model",
            setting="tokenizer_mode",
        )
    return MistralTokenizer(folder, path, chat_template)


def _by_file(folder: Path, chat_template: str | None) -> Tokenizer | None:
    """The tokenizer of a folder whose files tell which library reads them; None: Transformers knows."""
    from quire.tokenizers.mistral import find_mistral_file
    from quire.tokenizers.ranks import RankTokenizer, find_rank_file

    if find_mistral_file(folder) is not None:
        return _mistral(folder, chat_template)
    if (path := find_rank_file(folder)) is not None:
        return RankTokenizer(folder, path, chat_template)
    path = folder / "tokenizer.model"
    if path.is_file() and "tokenizer_class" not in read_json(folder / "tokenizer_config.json"):
        from quire.tokenizers.sentencepiece_file import SentencePieceTokenizer

        return SentencePieceTokenizer(folder, path, chat_template)
    return None
