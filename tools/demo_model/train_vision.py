"""Train what the demo model sees with: a small SigLIP and LLaVA's projector before the language model, which stays as it is.

    PYTHONPATH=src OMP_NUM_THREADS=1 python -m tools.demo_model.train_vision --checkpoint FILE

Two things learn side by side, so that neither pays for the other. A table of embeddings, one for each value of each fact that a
picture can have, learns through the language model that questions are answered (`facts_table.py`). The tower learns to know the
facts of pictures, and the projector to say them with the table's embeddings. In the end the language model reads what the
projector says, and its answers teach both. `--seconds` ends a piece sooner; the next one goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import SiglipVisionConfig, SiglipVisionModel

from tokenizers import AddedToken, Tokenizer

from .drawings import COLOURS, FACTS, KINDS, SHAPES, draw
from .facts_table import CELLS, PLACES, VALUES, FactsTable, Reader, numbers_of
from .optimizer import MuonAdamW
from .part_training import PartRun, run_arguments
from .rendering import template_source
from .tokenizer import tokenizer_config
from .train import ASSETS, GENERATION_CONFIG

OUT = ASSETS.with_name("demo_vision")
MARKER = "<image>"
PATCH, HIDDEN = 12, 96
ROW = round(CELLS**0.5)
SIDE = ROW * PATCH
SEEN, READ, ASKED = 64, 8, 4
"""A step: pictures for the tower, facts for the table, and questions about each of these."""
READING = 200
"""The first steps, in each of which the language model reads, whatever `--read-every`."""
APART = 0.65
"""The share of the run after which the language model reads what the projector says in the table's place."""
VISION = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 3,
          "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False}  # fmt: skip
PAINTED, SHOWN = ("", *COLOURS), ("", *SHAPES, "bar", "digit")
Questions = list[list[tuple[str, str]]]


class Eye(nn.Module):
    """The tower, the projector and the table; and two heads that only training has: which fact has which value, and what
    stands in each patch."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.vision_tower = SiglipVisionModel(SiglipVisionConfig(**VISION, attn_implementation="eager"))
        hidden = reader.words.shape[1]
        self.linear_1, self.linear_2 = nn.Linear(HIDDEN, hidden), nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(HIDDEN)
        self.facts, self.patches = nn.Linear(HIDDEN, len(VALUES)), nn.Linear(HIDDEN, len(PAINTED) + len(SHOWN))
        self.table = FactsTable(reader)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The embeddings of pictures [B, CELLS, hidden], and the heads' logits."""
        tower = getattr(self.vision_tower, "vision_model", self.vision_tower)
        with torch.autocast("cpu", torch.bfloat16):
            rows = tower.encoder(inputs_embeds=tower.embeddings(pixels.float() / 127.5 - 1)).last_hidden_state
            seen, read = self.linear_2(F.gelu(self.linear_1(rows))), self.norm(rows)
            return seen.float(), self.facts(read[:, PLACES]).float(), self.patches(read).float()


def drawn(count: int, file: Path) -> tuple[TensorDataset, Questions]:
    """So many pictures, drawn once and kept in a file, and what is asked about each. Half of them have shapes, which are asked
    about most.

    A picture is its pixels, as small as their processor makes them [3, SIDE, SIDE]; its facts' values, and which facts its
    kind has [facts]; the colour and the thing in each patch [CELLS].
    """
    if not file.exists():
        kinds = [*KINDS, "shapes"]
        pixels, facts = torch.zeros(count, 3, SIDE, SIDE, dtype=torch.uint8), torch.zeros(count, len(FACTS)).long()
        patches, asked, of_kind = torch.zeros(count, CELLS, 2).long(), Questions(), defaultdict[str, list[int]](list)
        for place in range(count):
            kind = kinds[place % len(kinds)]
            scene = draw(kind, place)
            small = np.array(scene.image.resize((SIDE, SIDE), 3))
            pixels[place], facts[place] = (
                torch.from_numpy(small).permute(2, 0, 1),
                torch.tensor(numbers_of(scene.facts)),
            )
            for x, y, colour, thing in scene.marks:
                cell = min(ROW - 1, int(y * ROW)) * ROW + min(ROW - 1, int(x * ROW))
                patches[place, cell] = torch.tensor([PAINTED.index(colour), SHOWN.index(thing)])
            asked.append([(one.user, one.answer) for one in scene.asked])
            of_kind[kind].append(place)
        has = torch.zeros(facts.shape, dtype=torch.bool)
        for places in of_kind.values():
            has[places] = (facts[places] != 0).any(dim=0)
        torch.save(((pixels, facts, has, patches), asked), file)
    tensors, asked = torch.load(file)
    return TensorDataset(*tensors), asked


def looking(eye: Eye, pixels: Tensor, facts: Tensor, has: Tensor, patches: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The embeddings of pictures; and the losses of which fact has which value, of what stands where, and of embeddings that are
    not the table's."""
    seen, values, stands = eye(pixels)
    # That a picture has no such fact is learnt from a part of them: there are many.
    counts = has & ((facts != 0) | (torch.rand(facts.shape) < 0.2))
    known = F.cross_entropy(values[counts], facts[counts])
    placed = pixels.new_zeros((), dtype=torch.float)
    for part, wanted in zip(stands.split([len(PAINTED), len(SHOWN)], dim=-1), patches.unbind(-1), strict=True):
        weights = torch.ones(part.shape[-1])
        weights[0] = 0.1
        placed = placed + F.cross_entropy(part.flatten(0, 1), wanted.flatten(), weights)
    matters = torch.ones(seen.shape[:2])
    matters[:, PLACES] = torch.where(has, 1.0, 0.3)
    wanted = eye.table(facts).detach()
    far = ((seen - wanted).square().mean(-1) * matters).mean() / 0.16
    return seen, [known, 0.5 * placed, 0.3 * far]


def reading(reader: Reader, embeddings: Tensor, questions: Questions) -> tuple[Tensor, str]:
    """The loss of answers that the language model gives about embeddings, and how many of their tokens are right."""
    logits, wanted = reader.answers(embeddings, questions)
    return F.cross_entropy(logits, wanted), f"tokens {(logits.argmax(-1) == wanted).float().mean():.3f}"


def save(eye: Eye, out: Path) -> None:
    """The tower and the projector in bfloat16 as a checkpoint of LLaVA, whose language model is the demo model's."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        ("" if name.startswith("vision_tower.") else "multi_modal_projector.") + name: value.to(torch.bfloat16)
        for name, value in eye.state_dict().items()
        if name.startswith(("vision_tower.", "linear_")) and "post_layernorm" not in name
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
    parser = run_arguments(argparse.ArgumentParser(description=__doc__), minutes=10.0, out=OUT)
    parser.add_argument("--pictures", type=int, default=24000, help="that are drawn, once")
    parser.add_argument(
        "--read-every", type=int, default=1, help="in which steps the language model reads: each one, each second …"
    )
    arguments = parser.parse_args()
    torch.manual_seed(1)
    reader = Reader()
    eye = Eye(reader)
    pictures, asked = drawn(arguments.pictures, arguments.checkpoint.with_suffix(".pictures"))
    run = PartRun(eye, arguments, peak=4e-3, optimizer=MuonAdamW(eye, weight_decay=0.02))
    told = ""
    for step in run.steps():
        rng = random.Random(step)
        chosen = rng.sample(range(len(pictures)), SEEN)
        seen, parts = looking(eye, *pictures[chosen])
        together = run.progress > APART
        if step < READING or step % arguments.read_every == 0:
            facts = eye.table(pictures.tensors[1][chosen[:READ]])
            read = seen[:READ] if together else facts + 0.1 * torch.randn_like(facts)
            loss, told = reading(
                reader, read, [rng.sample(asked[each], min(ASKED, len(asked[each]))) for each in chosen[:READ]]
            )
            parts.append(loss)
        figures = " ".join(f"{part:.3f}" for part in parts)
        run.learn(torch.stack(parts).sum(), f"facts, patches, embeddings, answers {figures}, {told}")
    save(eye, arguments.out)


if __name__ == "__main__":
    main()
