"""From the tokenizer in a GGUF file to tokenizer.json and tokenizer_config.json.

Two kinds: byte-level BPE (`gpt2`, with the pre-tokenizer that `tokenizer.ggml.pre` names), and SentencePiece's BPE with scores
(`llama`), whose merges follow from the scores. Others need a tokenizer.json beside the file.
"""

import re
from typing import Any

from quire.config.gguf.container import GGUFFile
from quire.errors import ConfigError
from quire.guards import is_sequence

PADDING = re.compile(r"\[PAD\d+\]")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens."""
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _END
_GPT4O = f"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}" + r"|\p{N}{1,3}" + _END
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "glm4"), _LLAMA3),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "granite-docling", "default"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
}
"""How text is cut before merges, by `tokenizer.ggml.pre`; of several patterns each cuts what the one before it left."""
WHOLE_WORDS = ("llama-bpe", "tekken")
"""A piece of text that is a token is one, whatever merges would make of it."""


def build_tokenizer(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json).
    Raises ConfigError: a kind of tokenizer that cannot be written so, or parts of it are missing."""
    kind, tokens = file.metadata.get("tokenizer.ggml.model"), _list(file, "tokens")
    types: list[int] = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise _unusable(file, f"it has {len(types)} types for {len(tokens)} tokens")
    if kind == "gpt2":
        model = _byte_level(file, tokens)
    elif kind == "llama":
        model = _sentencepiece(file, tokens, types)
    else:
        raise _unusable(file, f"tokenizer.ggml.model={kind!r} is not supported; supported: gpt2, llama")
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] in (CONTROL, UNKNOWN),
        }
        for i, token in enumerate(tokens)
        if types[i] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    config = _special(file, tokens)
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    processor = _prepend(config["bos_token"], tokens) if adds_bos and "bos_token" in config else None
    return {"version": "1.0", "added_tokens": added, "post_processor": processor, **model}, config


def _unusable(file: GGUFFile, why: str) -> ConfigError:
    return ConfigError(
        f"{file.path}: no tokenizer can be made of it ({why}); put the model's tokenizer.json beside it, or name a folder or "
        f"hub id that has one with tokenizer=",
        setting="tokenizer",
    )


def _list(file: GGUFFile, name: str) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not is_sequence(values) or not values:
        raise _unusable(file, f"it has no tokenizer.ggml.{name}")
    return list(values)


def _byte_level(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    merges, pre = _list(file, "merges"), str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in SPLITS:
        raise _unusable(file, f"tokenizer.ggml.pre={pre!r} is not supported; supported: {', '.join(SPLITS)}")
    cuts = SPLITS[pre]
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in ((cuts,) if isinstance(cuts, str) else cuts)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": _bpe(tokens, [str(merge).split(" ", 1) for merge in merges], ignore_merges=pre in WHOLE_WORDS),
    }


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = _list(file, "scores")
    if len(scores) != len(tokens):
        raise _unusable(file, f"it has {len(scores)} scores for {len(tokens)} tokens")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    has_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    prepend = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, _merges_by_score(tokens, types, scores), unk_token=tokens[unknown], byte_fallback=True),
    }


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """Every way to put a token together from two, the best-scored tokens first."""
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    found = [
        (-scores[i], ids[token[:cut]], ids[token[cut:]])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [[tokens[left], tokens[right]] for _, left, right in sorted(found)]


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    # Conversion fills ids that have no token with [PAD1], [PAD2] …
    vocab = {token: i for i, token in enumerate(tokens) if not PADDING.fullmatch(token)}
    defaults = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    more = {"fuse_unk": True, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **defaults, **more, **options, "vocab": vocab, "merges": merges}


def _special(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[f"{ours}_token"] = tokens[token_id]
    template = file.metadata.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if template else {})


def _prepend(token: str, tokens: list[str]) -> dict[str, Any]:
    special, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, special, second],
        "special_tokens": {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}},
    }
