"""A tiny DeepSeek-VL2, whose code is not Transformers', of Transformers' parts: SigLIP's encoder, and DeepSeek's language models.
What stands between them is written here as its authors describe it.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from tests.oracles.tiny_models import TEXT, randomize, tiny_values

ARCHITECTURE = "DeepseekVLV2ForCausalLM"
SIDE, PATCH = 20, 4
_LATENT = {name: value for name, value in tiny_values("DeepseekV2ForCausalLM").items() if name not in TEXT}
_MIXTURE = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "first_k_dense_replace",
)
LANGUAGES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": TEXT
    | _LATENT
    | {"num_key_value_heads": 4, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "DeepseekV3ForCausalLM": TEXT
    | {name: value for name, value in tiny_values("DeepseekV3ForCausalLM").items() if name not in TEXT}
    | {"num_key_value_heads": 4, "topk_method": "noaux_tc"},
    "DeepseekForCausalLM": TEXT
    | {name: _LATENT[name] for name in _MIXTURE}
    | {"use_mla": False, "topk_method": "greedy", "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0},
}
"""By the architecture of the language model: its config, as published ones are."""
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "deepseek_vl_v2",
    "tile_tag": "2D",
    "global_view_pos": "head",
    "vision_config": {
        "width": 32, "layers": 2, "heads": 2, "mlp_ratio": 1.53, "image_size": SIDE, "patch_size": PATCH, "model_type": "vision",
    },
    "projector_config": {"n_embed": 64, "model_type": "mlp_projector"},
    "language_config": {name: value for name, value in LANGUAGES["DeepseekV2ForCausalLM"].items() if name != "use_mla"},
    "bos_token_id": 0,
}  # fmt: skip
PROCESSOR: dict[str, Any] = {
    "processor_class": "DeepseekVLV2Processor",
    "candidate_resolutions": [[20, 20], [20, 40], [40, 20], [40, 40], [60, 20]],
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.3, 0.4, 0.5],
}
_PARTS = {
    "embeddings.patch_embedding.": "patch_embed.proj.", "embeddings.position_embedding.weight": "pos_embed",
    "encoder.layers.": "blocks.", "layer_norm1": "norm1", "layer_norm2": "norm2", "self_attn.out_proj": "attn.proj",
    "post_layernorm": "norm",
}  # fmt: skip
"""SigLIP's names in Transformers, and in the published checkpoints."""


class DeepseekVL2Reference(torch.nn.Module):
    """The whole model.

    Args:
        fields: of config.json.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        from transformers import SiglipVisionConfig, SiglipVisionModel

        super().__init__()
        self.fields, eyes, text = fields, fields["vision_config"], fields["language_config"]
        seen = SiglipVisionConfig(
            hidden_size=eyes["width"], intermediate_size=int(eyes["width"] * eyes["mlp_ratio"]), vision_use_head=False,
            num_hidden_layers=eyes["layers"], num_attention_heads=eyes["heads"], image_size=SIDE, patch_size=PATCH,
        )  # fmt: skip
        seen._attn_implementation = "eager"
        self.vision, self.language = SiglipVisionModel(seen), _language(text)
        self.config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=text["hidden_size"]))
        width, outputs = 4 * eyes["width"], fields["projector_config"]["n_embed"]
        gelu, linear = torch.nn.GELU(), torch.nn.Linear
        self.projector = torch.nn.ModuleDict(
            {"layers": torch.nn.Sequential(linear(width, outputs), gelu, linear(outputs, outputs))}
        )
        self.image_newline, self.view_seperator = (torch.nn.Parameter(torch.zeros(outputs)) for _ in range(2))
        self.eval()

    def save(self, path: Path, seed: int) -> None:
        """Write it as a checkpoint, with random weights."""
        from safetensors.torch import save_file

        randomize(self, seed)
        save_file(self.published(), path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(self.fields))
        (path / "processor_config.json").write_text(json.dumps(PROCESSOR))

    def load(self, path: str | Path) -> Self:
        from safetensors.torch import load_file

        tensors = load_file(Path(path) / "model.safetensors")
        for name, tensor in self.published(clone=False).items():
            tensor.copy_(tensors[name])
        for layer, block in enumerate(self.vision.encoder.layers):
            for end in ("weight", "bias"):
                parts = tensors[f"vision.blocks.{layer}.attn.qkv.{end}"].chunk(3)
                for each, part in zip("qkv", parts, strict=True):
                    getattr(getattr(block.self_attn, each + "_proj"), end).data.copy_(part)
        return self

    @torch.no_grad()
    def published(self, clone: bool = True) -> dict[str, torch.Tensor]:
        """Its tensors by the names of published checkpoints."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.state_dict().items():
            if name.startswith("vision."):
                for theirs, ours in _PARTS.items():
                    name = name.replace(theirs, ours)
            if ".self_attn." not in name or name.startswith("language."):
                found[name] = tensor[None] if name == "vision.pos_embed" else tensor
        if clone:
            for layer, block in enumerate(self.vision.encoder.layers):
                for end in ("weight", "bias"):
                    parts = [getattr(getattr(block.self_attn, each + "_proj"), end) for each in "qkv"]
                    found[f"vision.blocks.{layer}.attn.qkv.{end}"] = torch.cat(parts)
        return {name: tensor.clone().contiguous() for name, tensor in found.items()} if clone else found

    @torch.no_grad()
    def logprobs(self, token_ids: list[int], images: list[np.ndarray], marker: int) -> torch.Tensor:
        """Of each position of an expanded prompt."""
        ids = torch.tensor([token_ids])
        embeds = self.language.get_input_embeddings()(ids)
        if images:
            embeds[ids == marker] = torch.cat([self._see(image, cuts=len(images) <= 2) for image in images])
        return self.language(inputs_embeds=embeds).logits[0].log_softmax(-1)

    def _see(self, image: np.ndarray, cuts: bool) -> torch.Tensor:
        width, height = _size_of(image.shape[1], image.shape[0]) if cuts else (SIDE, SIDE)
        large = _pixels(image, width, height)
        squares = [_pixels(image, SIDE, SIDE)]
        squares += [
            large[:, top : top + SIDE, left : left + SIDE]
            for top in range(0, height, SIDE)
            for left in range(0, width, SIDE)
        ]
        rows = self.vision(torch.stack(squares)).last_hidden_state
        side = SIDE // PATCH
        grid = torch.nn.functional.pad(rows.view(len(rows), side, side, -1), (0, 0, 0, side % 2, 0, side % 2))
        beside = torch.nn.functional.unfold(grid.permute(0, 3, 1, 2), 2, stride=2).transpose(1, 2)
        cells = (side + 1) // 2
        made = self.projector["layers"](beside).view(len(rows), cells, cells, -1)
        local = torch.cat([torch.cat(list(row), dim=1) for row in made[1:].split(width // SIDE)], dim=0)
        views = [self._ended(made[0]), self._ended(local)]
        if self.fields["global_view_pos"] != "head":
            views.reverse()
        return torch.cat([views[0], self.view_seperator[None], views[1]])

    def _ended(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row, and a mark behind it."""
        return torch.cat([torch.cat((row, self.image_newline[None])) for row in rows])


def _language(text: dict[str, Any]) -> Any:
    import transformers
    from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
    from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel

    if text.get("use_mla", True):
        kind = (
            transformers.DeepseekV3ForCausalLM
            if text["topk_method"] == "noaux_tc"
            else transformers.DeepseekV2ForCausalLM
        )
        config = kind.config_class(**text)
        config._attn_implementation = "eager"
        return kind(config)
    sparse = [
        "sparse" if layer >= text["first_k_dense_replace"] else "dense" for layer in range(text["num_hidden_layers"])
    ]
    kept = {name: value for name, value in text.items() if not name.startswith(("use_mla", "qk_", "v_head", "first_k"))}
    config = DeepseekOcr2TextConfig(**kept, mlp_layer_types=sparse)
    config._attn_implementation = "eager"

    class WithHead(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = DeepseekOcr2TextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.model.embed_tokens

        def forward(self, inputs_embeds: torch.Tensor) -> Any:
            hidden = self.model(inputs_embeds=inputs_embeds).last_hidden_state
            return SimpleNamespace(logits=self.lm_head(hidden))

    return WithHead()


def _size_of(width: int, height: int) -> tuple[int, int]:
    """The candidate that keeps most of an image's pixels and, of several, wastes the fewest; the first of equal ones."""
    best, found = (-1, 0), (0, 0)
    for across, down in PROCESSOR["candidate_resolutions"]:
        scale = min(across / width, down / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        if (kept, kept - across * down) > best:
            best, found = (kept, kept - across * down), (across, down)
    return found


def _pixels(image: np.ndarray, width: int, height: int) -> torch.Tensor:
    """An image in the middle of a canvas of the mean's colour, normalized [3, height, width]."""
    from PIL import Image

    mean, std = (torch.tensor(PROCESSOR[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    ratio, target = image.shape[1] / image.shape[0], width / height
    size = (
        (width, round(image.shape[0] / image.shape[1] * width)) if ratio > target else (round(ratio * height), height)
    )
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (width, height), tuple(int(value * 255) for value in PROCESSOR["image_mean"]))
    canvas.paste(resized, (round((width - size[0]) * 0.5), round((height - size[1]) * 0.5)))
    return (torch.from_numpy(np.array(canvas)).permute(2, 0, 1).float() / 255 - mean) / std
