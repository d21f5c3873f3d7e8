"""A tokenizer in place of those that the cases fetch: the built-in demo model's, with every format's markers as tokens."""

import functools
from pathlib import Path
from typing import Any

import quire
from quire.parsers.choice import AnswerFormats
from quire.parsers.formats import REASONING, TOOLS

DEMO = Path(quire.__file__).parent / "assets" / "demo"
_ENCLOSED = {"<": ">", "[": "]", "◁": "▷", "{": "}"}
_OTHERS = ("<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<eos>", "<bos>", "</s>", "<s>", "[INST]", "[/INST]")


@functools.cache
def stand_in_tokenizer(*names: Any, **options: Any) -> Any:
    """A tokenizer of Transformers' for any model."""
    del names, options
    from transformers import AddedToken, PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast.from_pretrained(str(DEMO))
    markers: set[str] = {*_OTHERS, *AnswerFormats(is_harmony=True).markers}
    for reasoning in REASONING.values():
        markers |= AnswerFormats(reasoning=reasoning).markers
    for tools in TOOLS.values():
        markers |= AnswerFormats(tools=tools).markers
    known = found.get_vocab()
    tokens = [each for each in sorted(markers) if each not in known and _ENCLOSED.get(each[:1]) == each[-1:]]
    found.add_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    return found


def install() -> None:
    """From here on Transformers' `AutoTokenizer` gives this tokenizer."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained = staticmethod(stand_in_tokenizer)  # type: ignore[method-assign]
