"""Heads that draft for a model: EAGLE, EAGLE-3, and the layers for further tokens that checkpoints of some families have.

Each is a function of what the head's checkpoint says and of the model's spec. Checkpoints have the names of their publishers.
"""

import dataclasses
import re
from collections.abc import Collection

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.spec import MLA, Attention, DecoderSpec, Features, WeightNames

_QKV = ("q_proj", "k_proj", "v_proj")
EAGLE_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(drop=("q_norm", "k_norm"), features_0="fc.0", features_1="fc.1", masked="mask_hidden"),
    prefixes=("", "model."),
    flattened=("masked",),
    ignored=("*.inv_freq", "*layers.0.input_layernorm.weight"),
)
EAGLE3_NAMES = dataclasses.replace(
    EAGLE_NAMES.but(
        qkv=tuple(f"self_attn.{name}.0" for name in _QKV),
        pair_qkv=tuple(f"layers.0.self_attn.{name}.1" for name in _QKV),
        hidden_norm="layers.0.hidden_norm",
        features_2="fc.2",
        draft_to_target="d2t",
    ),
    ignored=("*.inv_freq", "t2d"),
    aliases={"midlayer.": "layers.0."},
)


@dataclasses.dataclass(frozen=True)
class _Names:
    """What a family calls its layer for further tokens; `{layer}` is the number of the model's layers. `project` reads the
    embedding first, unless `hidden_first`."""

    layer: str
    token_norm: str
    hidden_norm: str
    project: str
    final_norm: str
    hidden_first: bool = False
    prefix: str = "model."


_DEEPSEEK = _Names(
    "layers.{layer}.",
    "layers.{layer}.enorm",
    "layers.{layer}.hnorm",
    "layers.{layer}.eh_proj",
    "layers.{layer}.shared_head.norm",
)
_MIMO = _Names(
    "mtp_layers.0.",
    "mtp_layers.0.token_layernorm",
    "mtp_layers.0.hidden_layernorm",
    "mtp_layers.0.input_proj",
    "mtp_layers.0.final_layernorm",
    hidden_first=True,
)
_QWEN = _Names("layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", prefix="mtp.")
MTP_FAMILIES = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "MiMoForCausalLM": _MIMO,
    "Qwen3NextForCausalLM": _QWEN,
}
"""Architectures whose checkpoints have such a layer, which a spec of theirs does not read."""


def head_spec(method: str, hf: HFConfig, names: Collection[str], target: DecoderSpec, architecture: str) -> DecoderSpec:
    """The spec of a head.

    Args:
        method: `eagle`, `eagle3` or `mtp`.
        hf: config.json of the head's checkpoint; with `mtp` that is the model's.
        names: the checkpoint's, if they are known.

    Raises:
        ConfigError: no head of this kind fits this model.
    """
    if method == "mtp":
        return _mtp(target, architecture)
    if hf.hidden_size != target.hidden and method == "eagle":
        raise head_refusal(f"its hidden size is {hf.hidden_size}, and the model's {target.hidden}")
    spec = _eagle3(hf, names, target) if method == "eagle3" else _eagle(hf, names, target)
    return dataclasses.replace(spec, max_positions=target.max_positions, tied_embeddings=False)


def head_refusal(why: str) -> ConfigError:
    """That a head does not fit."""
    return ConfigError(f"speculative_config.model cannot be used: {why}", setting="speculative_config")


def _borrowed(names: Collection[str], usual: tuple[str, ...]) -> tuple[str, ...]:
    """What the checkpoint lacks of the modules outside of layers; `usual` where its names are not known."""
    if not names:
        return usual
    ends = {"embedding": "embed_tokens.weight", "lm_head": "lm_head.weight"}
    return tuple(module for module, end in ends.items() if not any(name.endswith(end) for name in names))


def _eagle(hf: HFConfig, names: Collection[str], target: DecoderSpec) -> DecoderSpec:
    """EAGLE (https://arxiv.org/abs/2401.15077): layers over a matrix of embedding and last state, no first and last norm."""
    features = Features(
        (target.layers,),
        target.hidden,
        target.vocab,
        bias=any(name.endswith("fc.bias") for name in names),
        masked=any(name.endswith("mask_hidden") for name in names),
        borrows=_borrowed(names, ("embedding", "lm_head")),
    )
    spec = llama(HFConfig(hf.to_dict() | {"vocab_size": target.vocab}))
    return dataclasses.replace(spec, weights=EAGLE_NAMES, first_norm=False, final_norm=False, features=features)


def _eagle3(hf: HFConfig, names: Collection[str], target: DecoderSpec) -> DecoderSpec:
    """EAGLE-3 (https://arxiv.org/abs/2503.01840): one layer, features of three depths, a vocabulary of its own. P-EAGLE has more
    layers, and features that stand for those of tokens that are not known yet."""
    values, own = hf.to_dict(), hf.get("eagle_config")
    chosen = own.get("eagle_aux_hidden_state_layer_ids") if isinstance(own, HFConfig) else None
    layers = tuple(chosen or (2, target.layers // 2, target.layers - 3))
    if len(layers) != 3 or min(layers) < 0 or max(layers) > target.layers:
        raise head_refusal(f"it reads layers {list(layers)} of a model of {target.layers}")
    vocab = values.get("draft_vocab_size") or target.vocab
    features = Features(
        layers,
        target.hidden,
        target.vocab,
        is_beside=True,
        bias=any(name.endswith("fc.bias") for name in names),
        masked=any(name.endswith("mask_hidden") for name in names),
        norms_residual=bool(values.get("norm_before_residual", False)),
        maps_tokens="d2t" in names if names else vocab != target.vocab,
        borrows=_borrowed(names, ("embedding",)),
    )
    numbers = {int(found[1]) for name in names if (found := re.search(r"(?:^|\.)layers\.(\d+)\.", name))}
    spec = llama(HFConfig(values | {"num_hidden_layers": max(numbers, default=0) + 1, "vocab_size": vocab}))
    return dataclasses.replace(spec, weights=EAGLE3_NAMES, features=features)


def _mtp(target: DecoderSpec, architecture: str) -> DecoderSpec:
    """A layer like the model's last one with attention, over a matrix of the norms of embedding and last hidden state
    (DeepSeek-V3, https://arxiv.org/abs/2412.19437)."""
    names = MTP_FAMILIES.get(architecture)
    if names is None:
        raise ConfigError(
            f"speculative_config.method='mtp' cannot be used: no layers for further tokens are known of {architecture}; there "
            f"are those of {', '.join(MTP_FAMILIES)}",
            setting="speculative_config",
        )
    layer = max(number for number in range(target.layers) if isinstance(target.mixers_of(number)[0], Attention | MLA))
    parts = (
        (f"{names.project}.1", f"{names.project}.0")
        if names.hidden_first
        else (f"{names.project}.0", f"{names.project}.1")
    )
    modules = {
        "token_norm": names.token_norm,
        "hidden_norm": names.hidden_norm,
        "features_0": parts[0],
        "features_1": parts[1],
        "final_norm": names.final_norm,
    }
    numbered = {module: name.format(layer=target.layers) for module, name in modules.items()}
    weights: WeightNames = dataclasses.replace(
        target.weights,
        modules={**target.weights.modules, **numbered},
        prefixes=(names.prefix,),
        layer=names.layer.format(layer=target.layers),
        ignored=("*",),
    )
    borrows = ("embedding", "lm_head")
    return dataclasses.replace(
        target,
        layers=1,
        mixer=target.mixers_of(layer)[0],
        mlp=(target.mlps()[layer],),
        placement=target.placements()[layer],
        weights=weights,
        tied_embeddings=False,
        features=Features((target.layers,), target.hidden, target.vocab, normed=True, borrows=borrows),
        vision=None,
        taps=(),
        joints=(),
    )
