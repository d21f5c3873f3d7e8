"""Which tokenizer a folder holds, and how to open it."""

from pathlib import Path

from quire.config.gguf.folder import NO_TOKENIZER
from quire.errors import ConfigError
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
"""Any of these means that the folder has a tokenizer."""

TOKENIZER_MODES = ("auto", "hf", "slow")


def has_tokenizer(path: str) -> bool:
    """Whether the folder holds any tokenizer file."""
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def get_tokenizer(path: str, mode: str = "auto", *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer in a folder.

    Args:
        mode: `auto` and `hf` take tokenizer.json if there is one and Transformers otherwise; `slow` always takes
            Transformers' Python tokenizer.
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
    if mode != "slow" and (folder / "tokenizer.json").is_file():
        from quire.tokenizers.fast import FastTokenizer

        return FastTokenizer(folder, chat_template)
    from quire.tokenizers.transformers_fallback import TransformersTokenizer

    return TransformersTokenizer(folder, chat_template, use_fast=mode != "slow")
