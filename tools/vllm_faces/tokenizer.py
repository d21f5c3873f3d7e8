"""A tokenizer in place of those that the cases fetch: trained on Quire's pages, with every format's markers as tokens."""

import functools
from pathlib import Path
from typing import Any

from quire.parsers.choice import AnswerFormats
from quire.parsers.formats import REASONING, TOOLS

TEXTS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
NUM_TOKENS = 4096
_ENCLOSED = {"<": ">", "[": "]", "◁": "▷", "{": "}"}
_OTHERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<eos>",
    "<bos>",
    "</s>",
    "<s>",
    "[INST]",
    "[/INST]",
)


@functools.cache
def stand_in_tokenizer(*names: Any, **options: Any) -> Any:
    """A tokenizer of Transformers' for any model."""
    del names, options
    from transformers import AddedToken, PreTrainedTokenizerFast

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train(
        list(map(str, TEXTS)),
        trainers.BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=alphabet, show_progress=False),
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    markers: set[str] = {*_OTHERS, *AnswerFormats(is_harmony=True).markers}
    for reasoning in REASONING.values():
        markers |= AnswerFormats(reasoning=reasoning).markers
    for tools in TOOLS.values():
        markers |= AnswerFormats(tools=tools).markers
    tokens = [each for each in sorted(markers) if _ENCLOSED.get(each[:1]) == each[-1:]]
    found.add_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    return found


def detokenize_incrementally(
    tokenizer: Any,
    all_input_ids: list[int],
    prev_tokens: list[str] | None,
    prefix_offset: int,
    read_offset: int,
    skip_special_tokens: bool = False,
    **options: Any,
) -> tuple[list[str], str, int, int]:
    """The text that the last of some tokens adds: cases cut answers so. Here `prefix_offset` counts characters."""
    del prev_tokens, options
    text = tokenizer.decode(all_input_ids, skip_special_tokens=skip_special_tokens)
    token = tokenizer.convert_ids_to_tokens(all_input_ids[-1:])
    if text.endswith("\ufffd"):
        return token, "", prefix_offset, read_offset
    return token, text[prefix_offset:], len(text), len(all_input_ids)


def install() -> None:
    """From here on Transformers' `AutoTokenizer` gives this tokenizer."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained = staticmethod(stand_in_tokenizer)  # type: ignore[method-assign]
