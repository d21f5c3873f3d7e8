"""Train what the demo model sees with: a small SigLIP and LLaVA's projector before the language model, which stays as it is.

    PYTHONPATH=src python -m tools.demo_model.train_vision --device cuda --workers 14 --minutes 3 --checkpoint FILE

Plain Transformers. In the first 40 % of the time the language model has no part: the tower learns what stands where, and
embeddings learn to be words. Then the language model answers questions about each picture, and its answers teach; one core alone
takes seconds for a step of that. `--seconds` ends a piece sooner; the next one goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from tokenizers import AddedToken, Tokenizer

from .drawings import COLOURS, KINDS, SHAPES, Scene, draw
from .part_training import PartRun, ahead, run_arguments
from .rendering import template_source
from .tokenizer import tokenizer_config
from .train import ASSETS, GENERATION_CONFIG

OUT = ASSETS.with_name("demo_vision")
MARKER = "<image>"
SIDE, PATCH, HIDDEN = 96, 12, 128
CELLS = SIDE // PATCH
BATCH = 64
EMPTY = Image.new("RGB", (1, 1))
VISION = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 4,
          "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False}  # fmt: skip
PAINTED, SHOWN = ("", *COLOURS), ("", *SHAPES, "bar", "digit")
BLIND = 0.4
"""The share of the run in which the language model does not take part."""


class Eye(nn.Module):
    """The tower, the projector, and a head that says what stands in each patch, which only training has."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.vision_tower = SiglipVisionModel(SiglipVisionConfig(**VISION, attn_implementation="eager"))
        self.linear_1, self.linear_2 = nn.Linear(HIDDEN, hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(HIDDEN, len(PAINTED) + len(SHOWN))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings of pictures [B, patches, hidden], and the head's logits."""
        tower = getattr(self.vision_tower, "vision_model", self.vision_tower)
        with torch.autocast(pixels.device.type, torch.bfloat16):
            rows = tower.encoder(inputs_embeds=tower.embeddings(pixels)).last_hidden_state
            return self.linear_2(F.gelu(self.linear_1(rows))).float(), self.head(rows).float()


def batch_of(step: int) -> tuple[list[Scene], npt.NDArray[np.uint8]]:
    """The scenes of a step, without their pictures, and these as small as their processor makes them [B, SIDE, SIDE, 3]. Half of
    them have shapes, which are asked about most."""
    kinds = [*KINDS, "shapes"]
    scenes = [draw(kinds[index % len(kinds)], step * BATCH + index) for index in range(BATCH)]
    pixels = np.stack([np.asarray(scene.image.resize((SIDE, SIDE), 3)) for scene in scenes])
    return [dataclasses.replace(scene, image=EMPTY) for scene in scenes], pixels


def what_stands_where(scenes: list[Scene], logits: Tensor) -> Tensor:
    """The loss of the head."""
    painted, shown = torch.zeros(2, len(scenes), CELLS**2, dtype=torch.long)
    for row, scene in enumerate(scenes):
        for x, y, colour, shape in scene.marks:
            cell = min(CELLS - 1, int(y * CELLS)) * CELLS + min(CELLS - 1, int(x * CELLS))
            painted[row, cell], shown[row, cell] = PAINTED.index(colour), SHOWN.index(shape)
    parts = logits.split([len(PAINTED), len(SHOWN)], dim=-1)
    losses = [
        F.cross_entropy(part.flatten(0, 1), wanted.flatten(), torch.tensor([0.1] + [1.0] * (part.shape[-1] - 1)))
        for part, wanted in zip(parts, (painted, shown), strict=True)
    ]
    return losses[0] + losses[1]


class Reader:
    """The language model, frozen, and its tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
        # Its attention in plain operations: the backward pass of the fused one takes longer than all else on one core.
        self.model = LlamaForCausalLM.from_pretrained(ASSETS, dtype=torch.bfloat16, attn_implementation="eager")
        self.model.requires_grad_(False).to(torch.get_default_device())
        self.words = self.model.get_input_embeddings().weight.float()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def words_at(self, scenes: list[Scene], seen: Tensor) -> tuple[Tensor, str]:
        """The loss of embeddings that are to be words, and how many are."""
        places = [
            (row, place, self.ids(word)[0]) for row, scene in enumerate(scenes) for place, word in scene.facts.items()
        ]
        row, place, word = torch.tensor(places).T
        found, wanted = seen[row, place], self.words[word]
        logits = F.linear(found, self.words)
        far = (found - wanted).square().sum() / wanted.square().sum()
        return F.cross_entropy(logits, word) + far / 2, f"words {(logits.argmax(-1) == word).float().mean():.3f}"

    def conversation(self, scene: Scene, rng: random.Random) -> tuple[list[int], list[int], list[int]]:
        """The tokens before a picture, those behind it, and the targets of these: questions in several turns."""
        system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        before = (system if rng.random() < 0.2 else "") + "<|im_start|>user\n"
        tokens, targets, user = list[int](), list[int](), ""
        for one in rng.sample(scene.asked, min(5, len(scene.asked))):
            asked = self.ids(f"{user}{one.user}<|im_end|>\n<|im_start|>assistant\n")
            answer, end = self.ids(one.answer + "<|im_end|>"), self.ids("\n")
            tokens += asked + answer + end
            targets += [-100] * (len(asked) - 1) + answer + [-100] * (1 + len(end))
            user = "<|im_start|>user\n"
        return self.ids(before), tokens, targets

    def answers(self, scenes: list[Scene], seen: Tensor, rng: random.Random) -> tuple[Tensor, str]:
        """The loss of answers about pictures, and how many of their tokens are right."""
        told = [self.conversation(scene, rng) for scene in scenes]
        cells, width = seen.shape[1], max(len(before) + len(tokens) for before, tokens, _ in told)
        wanted, rows = torch.full((len(told), cells + width), -100), []
        for row, (before, tokens, targets) in enumerate(told):
            padding = [0] * (width - len(before) - len(tokens))
            first, rest = (self.words[ids] for ids in (before, tokens + padding))
            rows.append(torch.cat((first, seen[row], rest)))
            wanted[row, len(before) + cells :][: len(targets)] = torch.tensor(targets)
        hidden = self.model.model(inputs_embeds=torch.stack(rows).bfloat16()).last_hidden_state
        logits = F.linear(hidden[wanted != -100].float(), self.words)
        wanted = wanted[wanted != -100]
        right = (logits.argmax(-1) == wanted).float().mean()
        return F.cross_entropy(logits, wanted), f"tokens {right:.3f}"


def save(eye: Eye, out: Path) -> None:
    """The tower and the projector in bfloat16 as a checkpoint of LLaVA, whose language model is the demo model's."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        ("" if name.startswith("vision_tower.") else "multi_modal_projector.") + name: value.to("cpu", torch.bfloat16)
        for name, value in eye.state_dict().items()
        if not name.startswith("head.") and "post_layernorm" not in name
    }
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(MARKER, special=True, normalized=False)])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_model_id": "quire-demo",
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_token_index": tokenizer.token_to_id(MARKER),
        "torch_dtype": "bfloat16",
    }
    processor = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "resample": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    described = tokenizer_config(tokenizer) | {"chat_template": template_source()}
    for name, values in {
        "config.json": config,
        "generation_config.json": GENERATION_CONFIG | {"temperature": 0.0, "do_sample": False},
        "preprocessor_config.json": processor,
        "tokenizer_config.json": described,
    }.items():
        (out / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    arguments = run_arguments(argparse.ArgumentParser(description=__doc__), minutes=3.0, out=OUT).parse_args()
    torch.manual_seed(1)
    torch.set_default_device(arguments.device)
    reader = Reader()
    eye = Eye(reader.words.shape[1])
    run = PartRun(eye, arguments, peak=2e-3)
    batches = ahead(batch_of, run.step, arguments.workers)
    for step in run.steps():
        scenes, pixels = next(batches)
        small = torch.from_numpy(pixels).to(arguments.device)
        seen, logits = eye((small.float() / 127.5 - 1).permute(0, 3, 1, 2))
        words, told = reader.words_at(scenes, seen)
        if run.progress < BLIND:
            loss = words + what_stands_where(scenes, logits)
        else:
            loss, right = reader.answers(scenes, seen, random.Random(step))
            loss, told = loss + 0.1 * words, f"{told}, {right}"
        run.learn(loss, told)
    save(eye, arguments.out)


if __name__ == "__main__":
    main()
