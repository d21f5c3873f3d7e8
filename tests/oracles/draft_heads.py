"""Heads that draft, in plain PyTorch and float32: every guess is computed from all tokens anew, without a cache.

`Head.guesses` is what a head says behind a sequence of tokens; checkpoints have the names of published ones.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.oracles.tiny_models import load_oracle, make_tiny_model

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Head:
    """A head of some kind.

    Args:
        target: the model, as Transformers runs it.
        layers: which hidden states it reads.
        first: features [k] of [P, D] to what `run` reads beside embeddings.
        run: embeddings and hidden states of all places to what the head leaves there, [P, D].
        logits: of what it leaves at one place, over the model's tokens.
        mask: the token, and what `first` makes of the features, that stand for the unknown; then all guesses come at once.
    """

    def __init__(
        self,
        target: Any,
        layers: list[int],
        first: Callable[[list[torch.Tensor]], torch.Tensor],
        run: Run,
        logits: Callable[[torch.Tensor], torch.Tensor],
        mask: tuple[int, torch.Tensor] | None = None,
    ) -> None:
        self.mask = mask
        self._target, self._layers, self._first, self._run, self._logits = target, layers, first, run, logits

    @torch.no_grad()
    def guesses(self, tokens: list[int], count: int) -> list[int]:
        embed = self._target.get_input_embeddings()
        states = self._target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hidden = self._first([states[layer][0] for layer in self._layers])
        embedded = embed(torch.tensor(tokens[1:]))
        if self.mask is not None:
            return self._guesses_at_once(embedded, hidden, count, *self.mask)
        found: list[int] = []
        for _ in range(count):
            out = self._run(embedded, hidden)[-1:]
            found.append(int(self._logits(out[0]).argmax()))
            embedded, hidden = torch.cat((embedded, embed(torch.tensor(found[-1:])))), torch.cat((hidden, out))
        return found

    def _guesses_at_once(
        self, embedded: torch.Tensor, hidden: torch.Tensor, count: int, token: int, feature: torch.Tensor
    ) -> list[int]:
        """Behind what is known stand so many of one token, with one feature."""
        masks = self._target.get_input_embeddings()(torch.tensor([token] * (count - 1)))
        out = self._run(torch.cat((embedded, masks)), torch.cat((hidden, feature.expand(count - 1, -1))))
        return [int(self._logits(row).argmax()) for row in out[-count:]]


def _layer(model: Any, layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer of Transformers over a whole sequence."""

    def run(x: torch.Tensor) -> torch.Tensor:
        count = len(x)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = torch.arange(count)[None]
        angles = model.model.rotary_emb(x[None], positions)
        out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out)[0]

    return run


def _random(shape: tuple[int, ...], seed: int, scale: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (scale or shape[-1] ** -0.5)


def _norm(size: int, seed: int) -> torch.Tensor:
    return 1.0 + _random((size,), seed, 0.2)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))


def make_eagle(path: Path, folder: Path) -> Head:
    """EAGLE for a Llama: a matrix, and a layer without its first norm; embedding and last matrix are the model's."""
    target, donor = load_oracle(path), load_oracle(make_tiny_model("LlamaForCausalLM", folder / "donor", seed=5))
    hidden, layer = target.config.hidden_size, donor.model.layers[1]
    weights = {
        f"layers.0.{name}": value
        for name, value in layer.state_dict().items()
        if not name.startswith("input_layernorm")
    }
    weights |= {"fc.weight": _random((hidden, 2 * hidden), 1), "fc.bias": _random((hidden,), 2, 0.3)}
    config = json.loads((path / "config.json").read_bytes()) | {"num_hidden_layers": 1}
    _write(folder / "head", config, weights)
    layer.input_layernorm = torch.nn.Identity()
    run = _layer(donor, layer)

    def over(embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return run(torch.cat((embedded, states), -1) @ weights["fc.weight"].T + weights["fc.bias"])

    return Head(target, [target.config.num_hidden_layers], lambda features: features[0], over, target.lm_head)


def make_peagle(path: Path, folder: Path) -> Head:
    """P-EAGLE for a Llama: EAGLE-3 of two layers, which adds to normed features, with a token and features of the unknown."""
    return make_eagle3(path, folder, layers_behind=1, norms_residual=True, mask_token=311)


def make_eagle3(
    path: Path,
    folder: Path,
    vocab: int = 200,
    *,
    layers_behind: int = 0,
    norms_residual: bool = False,
    mask_token: int | None = None,
) -> Head:
    """EAGLE-3 for a Llama, with some of the model's tokens."""
    target = load_oracle(path)
    config, layers = target.config, [0, 1, 2]
    hidden, width, heads, kv_heads = config.hidden_size, 16, 4, 2
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * width, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads * width, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * width),
        "midlayer.mlp.gate_proj.weight": (80, hidden),
        "midlayer.mlp.up_proj.weight": (80, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 80),
        "lm_head.weight": (vocab, hidden),
    }
    for number in range(1, 1 + layers_behind):
        behind = {name: shape for name, shape in shapes.items() if name.startswith("midlayer.")}
        for name, (rows, columns) in behind.items():
            columns = hidden if columns == 2 * hidden else columns
            shapes[name.replace("midlayer.", f"layers.{number}.")] = (rows, columns)
    w = {name: _random(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    for number in range(1, 1 + layers_behind):
        for seed, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            w[f"layers.{number}.{name}.weight"] = _norm(hidden, 70 + 2 * number + seed)
    for seed, name in enumerate(("hidden_norm", "input_layernorm", "post_attention_layernorm")):
        w[f"midlayer.{name}.weight"] = _norm(hidden, 50 + seed)
    w["norm.weight"] = _norm(hidden, 60)
    known = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(3))[:vocab].sort().values
    w["lm_head.weight"] *= 3.0
    is_known = torch.zeros(config.vocab_size, dtype=torch.bool)
    is_known[known] = True
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": 80,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width,
        "vocab_size": config.vocab_size, "draft_vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 256, "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }  # fmt: skip
    values |= {"norm_before_residual": norms_residual, "num_hidden_layers": 1 + layers_behind}
    mask = None
    if mask_token is not None:
        w["mask_hidden"] = _random((1, 3 * hidden), 90, 1.0)
        values["ptd_token_id"] = mask_token
        mask = (mask_token, w["mask_hidden"] @ w["fc.weight"].T)
    _write(folder / "head", values, w | {"d2t": known - torch.arange(vocab), "t2d": is_known})
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): value for name, value in w.items()}

    def rotate(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        one, other = x.chunk(2, -1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)

    def over(embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(states, w["hidden_norm"])
        x = torch.cat((rms_norm(embedded, w["input_layernorm"]), normed), -1)
        states = layer(x, normed if norms_residual else states, w)
        for number in range(1, 1 + layers_behind):
            prefix = f"layers.{number}."
            own = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
            states = layer(rms_norm(states, own["input_layernorm"]), states, own)
        return states

    def layer(x: torch.Tensor, states: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        q, k, v = (
            (x @ w[f"self_attn.{name}_proj"].T).view(len(x), count, width)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = rotate(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("tnh,snh->nts", rotate(q), k) * width**-0.5
        scores = scores + torch.full((len(x), len(x)), float("-inf")).triu(1)
        mixed = torch.einsum("nts,snh->tnh", scores.softmax(-1), v).reshape(len(x), -1)
        states = states + mixed @ w["self_attn.o_proj"].T
        y = rms_norm(states, w["post_attention_layernorm"])
        gate = torch.nn.functional.silu(y @ w["mlp.gate_proj"].T)
        return states + (gate * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T

    def logits(out: torch.Tensor) -> torch.Tensor:
        spread = torch.full((config.vocab_size,), float("-inf"))
        spread[known] = rms_norm(out, w["norm"]) @ w["lm_head"].T
        return spread

    return Head(target, layers, lambda features: torch.cat(features, -1) @ w["fc"].T, over, logits, mask)


FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {
        "layer": "model.layers.{layer}.", "token": "enorm", "hidden": "hnorm", "project": "eh_proj", "final": "shared_head.norm",
    },
    "Glm4MoeForCausalLM": {
        "layer": "model.layers.{layer}.", "token": "enorm", "hidden": "hnorm", "project": "eh_proj", "final": "shared_head.norm",
    },
    "MiMoForCausalLM": {
        "layer": "model.mtp_layers.0.", "token": "token_layernorm", "hidden": "hidden_layernorm", "project": "input_proj",
        "final": "final_layernorm", "made_as": "Qwen2ForCausalLM", "hidden_first": True,
    },
    "Qwen3NextForCausalLM": {
        "layer": "mtp.layers.0.", "stem": "mtp.", "token": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden",
        "project": "fc", "final": "norm", "offset": 1.0, "types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip


def make_mtp(architecture: str, path: Path) -> Head:
    """A model whose checkpoint has a layer for further tokens, at `path`: the last layer of one that was made with one more."""
    family = FAMILIES[architecture]
    made_as, types = family.get("made_as", architecture), family.get("types")
    layers = 3 if types is None else len(types)
    kinds = {} if types is None else {"layer_types": [*types, types[-1]]}
    make_tiny_model(made_as, path, num_hidden_layers=layers + 1, **kinds)
    longer = load_oracle(path)
    weights, config = load_file(str(path / "model.safetensors")), json.loads((path / "config.json").read_bytes())
    layer, hidden, offset = family["layer"].format(layer=layers), config["hidden_size"], family.get("offset", 0.0)
    stem = family.get("stem", layer)
    own = {
        f"{stem}{family['token']}.weight": _norm(hidden, 11) - offset,
        f"{stem}{family['hidden']}.weight": _norm(hidden, 12) - offset,
        f"{stem}{family['project']}.weight": _random((hidden, 2 * hidden), 13),
        f"{stem}{family['final']}.weight": _norm(hidden, 14) - offset,
    }
    token, other, project, final = own.values()
    token, other, final = token + offset, other + offset, final + offset
    last = f"model.layers.{layers}."
    short = {name: value for name, value in weights.items() if not name.startswith(last)}
    moved = {layer + name.removeprefix(last): value for name, value in weights.items() if name.startswith(last)}
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    _write(path, config, short)
    target = load_oracle(path)
    _write(path, config | {"architectures": [architecture]}, short | moved | own)
    run = _layer(longer, longer.model.layers[layers])

    def over(embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        parts = [
            rms_norm(embedded, token, target.config.rms_norm_eps),
            rms_norm(states, other, target.config.rms_norm_eps),
        ]
        return run(torch.cat(parts[::-1] if family.get("hidden_first") else parts, -1) @ project.T)

    def logits(out: torch.Tensor) -> torch.Tensor:
        return target.lm_head(rms_norm(out, final, target.config.rms_norm_eps))

    return Head(target, [layers], lambda features: features[0], over, logits)
