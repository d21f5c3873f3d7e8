"""What the language model reads instead of a picture: embeddings that say what is in it, learnt through the frozen model.

At every second place of a picture's embeddings stands a fact's value; before it, where there is room, stands what the fact
is about, the same for each picture. Knows no pixels.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tokenizers import Tokenizer

from .drawings import COLOURS, FACTS, KINDS, SHAPES
from .train import ASSETS

VALUES = ("", *KINDS, *map(str, range(10)), *COLOURS, *SHAPES)
CELLS = 36
"""Embeddings of a picture."""
ABOUT = list(range(0, 2 * (CELLS - len(FACTS)), 2))
PLACES = [cell for cell in range(CELLS) if cell not in ABOUT]
"""Where the values stand, in the order of `FACTS`."""
SIZE = 4.0
"""Embeddings are this many times the parameters: one learning rate suits them and the tower."""
BEFORE, BETWEEN, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


def numbers_of(facts: dict[str, str]) -> list[int]:
    """The number of each fact's value, 0 where a picture has none."""
    return [VALUES.index(facts.get(fact, "")) for fact in FACTS]


class Reader:
    """The language model, frozen, and its tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
        # Its attention in plain operations: the backward pass of the fused one takes longer than all else on one core.
        self.model = LlamaForCausalLM.from_pretrained(ASSETS, dtype=torch.bfloat16, attn_implementation="eager")
        self.model.requires_grad_(False)
        self.words = self.model.get_input_embeddings().weight.float()
        self.ids = functools.cache(lambda text: self.tokenizer.encode(text, add_special_tokens=False).ids)

    def answers(self, pictures: Tensor, asked: list[list[tuple[str, str]]]) -> tuple[Tensor, Tensor]:
        """The logits of the answers' tokens, and these tokens. The questions about one picture share its embeddings
        [B, CELLS, hidden] and do not see each other."""
        before = self.ids(BEFORE)
        first = len(before) + CELLS
        rows = [self._behind(first, questions) for questions in asked]
        width = max(row.shape[1] for row in rows)
        tokens, wanted, places, groups = torch.stack(
            [F.pad(row, (0, width - row.shape[1]), value=-100) for row in rows], dim=1
        )
        count = len(asked)
        told = (self.words[before].expand(count, -1, -1), pictures, self.words[tokens.clamp(min=0)])
        groups = torch.cat((torch.zeros(count, first, dtype=torch.long), groups), dim=1)
        places = torch.cat((torch.arange(first).expand(count, -1), places.clamp(min=0)), dim=1)
        sees = (groups[:, :, None] == groups[:, None]) | (groups[:, None] == 0)
        sees &= torch.ones(sees.shape[1:], dtype=torch.bool).tril()
        mask = torch.where(sees, 0.0, -1e9)[:, None].bfloat16()
        embedded = torch.cat(told, dim=1).bfloat16()
        read = self.model.model(inputs_embeds=embedded, attention_mask=mask, position_ids=places).last_hidden_state
        of_answers = wanted != -100
        return F.linear(read[:, first:][of_answers].float(), self.words), wanted[of_answers]

    def _behind(self, first: int, questions: list[tuple[str, str]]) -> Tensor:
        """Tokens, targets, positions and groups of some questions behind a picture [4, tokens]."""
        tokens, wanted, places, groups = list[int](), list[int](), list[int](), list[int]()
        for group, (question, answer) in enumerate(questions, start=1):
            asked, said = self.ids(question + BETWEEN), self.ids(answer + END)
            tokens += asked + said[:-1]
            wanted += [-100] * (len(asked) - 1) + said
            count = len(asked) + len(said) - 1
            places += range(first, first + count)
            groups += [group] * count
        return torch.tensor([tokens, wanted, places, groups])


class FactsTable(nn.Module):
    """An embedding for each value of each fact: at first that of its word. One part is the same for all values of a fact, so that
    what is learnt of one helps the others."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        words = reader.words
        about = [words[reader.ids(" " + fact.split()[-1])].mean(0) for fact in FACTS[: len(ABOUT)]]
        named = [f" {value}" if value.isalpha() else value for value in VALUES[1:]]
        values = [torch.zeros_like(words[0]), *(words[reader.ids(name)[0]] for name in named)]
        self.about = nn.Parameter(torch.stack(about)[None] / SIZE)
        self.shared = nn.Parameter(torch.zeros(len(FACTS), 1, words.shape[1]))
        self.values = nn.Parameter(torch.stack(values).repeat(len(FACTS), 1, 1) / SIZE)

    def forward(self, numbers: Tensor) -> Tensor:
        """The embeddings [B, CELLS, hidden] of pictures whose facts have these values [B, facts]."""
        pictures = self.values.new_zeros(len(numbers), CELLS, self.values.shape[-1])
        pictures[:, ABOUT] = self.about.expand(len(numbers), -1, -1) * SIZE
        pictures[:, PLACES] = (self.values + self.shared)[torch.arange(len(FACTS)), numbers] * SIZE
        return pictures
