"""Train the demo model's tokenizer on text that its own tasks generate, and write its files.

    PYTHONPATH=src python -m tools.demo_model.tokenizer

Writes `tokenizer.json` and `tokenizer_config.json` (with the chat template) into `src/quire/assets/demo`. A byte-level BPE:
any text has tokens. Digits stand alone, so that arithmetic sees places. About a minute on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .rendering import compile_template, render_document, template_source
from .tasks.examples import TASKS, generate

ASSETS = Path(__file__).resolve().parents[2] / "src" / "quire" / "assets" / "demo"

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISIBLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each, but part of the decoded text: whoever parses a reply needs to see them."""

_WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def documents(per_task: int) -> Iterator[str]:
    """Training conversations, as many of each task."""
    template = compile_template(template_source())
    for task in TASKS:
        for seed in range(per_task // 12 if task == "memory" else per_task):
            yield render_document(template, generate(task, seed))


def train_tokenizer(vocabulary: int, per_task: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocabulary` entries, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, START, END)]
    visible = [AddedToken(text, special=False, normalized=False) for text in VISIBLE_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*special, *visible],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(per_task), trainer)
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] not in VISIBLE_TOKENS
    return Tokenizer.from_str(json.dumps(saved))


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    """What `tokenizer_config.json` holds."""
    decoder = {
        str(number): {"content": token.content, "lstrip": False, "normalized": False, "rstrip": False,
                      "single_word": False, "special": token.special}
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }  # fmt: skip
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": template_source(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--per-task", type=int, default=12000, help="conversations of each task to learn from")
    parser.add_argument("--out", type=Path, default=ASSETS)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(arguments.vocabulary, arguments.per_task)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    text = json.dumps(tokenizer_config(tokenizer), indent=2, ensure_ascii=False)
    (arguments.out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens written to {arguments.out}")


if __name__ == "__main__":
    main()
