"""What a pooling model returns for a prompt, decided once from its files and the user's settings.

Knows names of architectures, config.json, and the module files that sentence-transformers writes beside it. Knows nothing
of tensors. Kinds of pooling: `last`, `cls` (the first token), `mean`, `weighted_mean` (weights 1, 2, 3 …), `mean_sqrt` (the
sum over the square root of the length) and `max`; the vectors of several kinds are concatenated.
"""

# ruff: noqa: RUF009  (`setting` makes the field)

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal, cast

from quire.config.checks import FLAG, TEXT, Check, read_object, setting, whole
from quire.config.files import read_json, read_json_object, read_json_object_if_there
from quire.config.hf_config import HFConfig
from quire.errors import ConfigError, Explained
from quire.guards import is_dict, is_sequence

Convert = Literal["embed", "classify", "token_classify", "reward"]

GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
GENERATIVE_IN_SPITE_OF_THEIR_NAMES = ("ChatGLMModel", "AquilaModel", "UltravoxModel", "Qwen2_5OmniModel")
SUFFIXES: dict[str, Convert] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForImageClassification": "classify",
    "ForProcessRewardModel": "reward",
    "ForRewardModel": "reward",
    "RewardModel": "reward",
    "ForMaskedLM": "embed",
    "ForRetrieval": "embed",
    "EmbeddingModel": "embed",
    "TextModel": "embed",
    "Model": "embed",
}
"""The end of a pooling architecture's name, and what the model returns. The rest of the name is the family."""
ENCODERS = {
    **dict.fromkeys(
        ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "ModernBert", "New", "GteNew", "Gte"), "cls"
    ),
    "NomicBert": "mean",
    "ViT": "cls",
    "Siglip": "last",
}
"""Families in which every token sees every other, and how their texts are pooled if no file says it."""
POSITIONS_AFTER_PADDING = ("Roberta", "XLMRoberta", "Camembert")
"""Families whose table of positions begins behind the padding token's id."""
PAIRED = ("CLIP", "Siglip")
"""Families that make one vector of a text, or of an image."""
IMAGES_ALONE = ("ViT",)
"""Families that read an image and no text."""
FILLED_UP = ("Siglip",)
"""Families whose texts are filled up with padding to their full length, as they were in training."""
RETRIEVERS = ("ColPali", "ColQwen2")
"""Families that make a vector of each token, of texts and of images, to be compared one by one."""
KINDS = ("last", "cls", "mean", "weighted_mean", "mean_sqrt", "max")
_SBERT_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""The switches of a Pooling module, in the order in which their vectors are concatenated."""
_SBERT_NAMES = {"lasttoken": "last", "weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt"}
_SBERT_FILES = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
_ACTIVATIONS = {"identity": "none", "sigmoid": "sigmoid", "softmax": "softmax"}
_PROBLEMS = {"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
TWO_WAY = "from_2_way_softmax"
PER_TOKEN = ("all", "step")
_POOLING_TYPE = Check(
    f"one of {', '.join(kind.upper() for kind in KINDS)}, ALL or STEP",
    lambda value: str(value).lower() in (*KINDS, *PER_TOKEN),
)
_TOKEN_POOLING_TYPE = Check("ALL or STEP", lambda value: str(value).lower() in PER_TOKEN)
_TOKEN_IDS = Check(
    "a list of whole numbers",
    lambda value: is_sequence(value) and all(isinstance(item, int) and item >= 0 for item in value),
)
_AT_DEFAULT = {"enable_flash_late_interaction": True}
"""vLLM's keys that are accepted at their defaults."""


@dataclasses.dataclass
class PoolerConfig:
    """The value of `pooler_config`; a dict of the same keys works, too. None means the model's own value.

    Attributes:
        task: `embed`, `classify`, `token_embed` or `token_classify`.
        pooling_type: the older spelling of the next.
        seq_pooling_type: `CLS`, `LAST` or `MEAN`; tok_pooling_type: `ALL` or `STEP`.
        use_activation: normalise embeddings, turn scores into probabilities.
        dimensions, step_tag_id, returned_token_ids: as in `PoolingParams`, for all requests.
        enable_chunked_processing: embed texts longer than the model reads in pieces, and average the pieces' vectors.
        max_embed_len: the most tokens of a text to embed; None means max_model_len, and in pieces any number.
    """

    task: str | None = setting(None, TEXT)
    pooling_type: str | None = setting(None, _POOLING_TYPE)
    seq_pooling_type: str | None = setting(None, _POOLING_TYPE)
    tok_pooling_type: str | None = setting(None, _TOKEN_POOLING_TYPE)
    use_activation: bool | None = setting(None, FLAG, aliases=("normalize", "softmax", "activation"))
    dimensions: int | None = setting(None, whole(0))
    step_tag_id: int | None = setting(None, whole(0))
    returned_token_ids: list[int] | None = setting(None, _TOKEN_IDS)
    enable_chunked_processing: bool | None = setting(None, FLAG)
    max_embed_len: int | None = setting(None, whole(0))


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A Dense module of sentence-transformers: `act(x @ weight.T + bias)` on the pooled vector. `folder` is relative to the
    checkpoint's."""

    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"


@dataclasses.dataclass(frozen=True)
class PoolingConfig:
    """How the last hidden states become a result.

    Attributes:
        convert: what the model is used as.
        family: the architecture's name without its ending (`Qwen2` of `Qwen2ForSequenceClassification`).
        tasks: what requests may ask for, the default first.
        kinds: how a sequence becomes a vector.
        activation: `normalize`, `softmax`, `sigmoid` or `none`.
        is_causal: a token sees only those before it; else a prompt is computed whole in one step.
        num_labels: numbers of a classifier; 0 for embeddings.
        label_tokens: the tokens whose logits a classifier's numbers are, where the checkpoint is one that generates.
        dense: matrices between the pooled vector and the embedding.
        dimensions: the embedding's length where a request names none; 0 means all.
        matryoshka: the lengths that a request may ask for; (0,) means any, () means none.
        step_tag_id, returned_token_ids: defaults of requests.
        max_length: tokens a prompt may have, by sentence-transformers' file; 0 where it says nothing.
        lower_case: texts are lower-cased before they are tokenized.
        prompts: the text that is put before an input, by the prompt's name.
        in_pieces: texts longer than the model reads are embedded in pieces.
        max_embed_len: the most tokens of a text to embed; 0 means the model's limit.
    """

    convert: Convert
    family: str
    tasks: tuple[str, ...]
    kinds: tuple[str, ...] = ("last",)
    activation: str = "normalize"
    is_causal: bool = True
    num_labels: int = 0
    label_tokens: tuple[int, ...] = ()
    dense: tuple[DenseConfig, ...] = ()
    dimensions: int = 0
    matryoshka: tuple[int, ...] = ()
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    max_length: int = 0
    lower_case: bool = False
    prompts: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    in_pieces: bool = False
    max_embed_len: int = 0

    @property
    def embeds(self) -> bool:
        """Whether it gives embeddings rather than scores."""
        return self.convert == "embed"

    @property
    def embedding_task(self) -> str:
        """What an embedding is asked for as: vectors of tokens where the model gives no others."""
        return "token_embed" if self.tasks == ("token_embed",) else "embed"

    def reads_prefixes(self, task: str) -> bool:
        """Whether a prompt's result follows from its last token alone, so that pages of an equal prefix will do."""
        return self.is_causal and self.kinds == ("last",) and not task.startswith("token_")


def split_architecture(architecture: str) -> tuple[str, Convert | None]:
    """The family's name, and what the architecture returns; None for one that generates."""
    if architecture in GENERATIVE_IN_SPITE_OF_THEIR_NAMES:
        return architecture, None
    for suffix in GENERATIVE:
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix), None
    for suffix, convert in SUFFIXES.items():
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix).removesuffix("Bidirectional").removesuffix("Text"), convert
    return architecture, None


def resolve_pooling(
    path: str,
    hf_config: HFConfig,
    architecture: str,
    *,
    runner: str = "auto",
    convert: str = "auto",
    pooler_config: dict[str, Any] | None = None,
) -> PoolingConfig | None:
    """How the model pools; None for one that generates.
    Raises ConfigError if `runner` and `convert` contradict one another or the architecture, or if a file is not valid."""
    family, own = split_architecture(architecture)
    modules = _sbert_modules(path)
    asked = cast("Convert | None", None if convert in ("auto", "none") else convert)
    if runner == "generate":
        _refuse_pooling(architecture, own, asked)
        _refuse_both_directions(hf_config)
        return None
    if runner == "auto" and own is None and asked is None and not (modules and convert == "auto"):
        if pooler_config:
            raise ConfigError(
                f"pooler_config is given, but {architecture} generates: set runner='pooling'", setting="pooler_config"
            )
        _refuse_both_directions(hf_config)
        return None
    if own is None and convert == "none":
        raise ConfigError(
            f"convert='none' leaves {architecture} a model that generates: use convert='embed', 'classify' or 'reward' "
            "with runner='pooling'",
            setting="convert",
        )
    config = _of_architecture(asked or own or "embed", architecture, family, hf_config)
    if config.embeds and modules:
        config = _with_modules(config, path, modules)
    config = dataclasses.replace(config, **_sbert_settings(path))
    return _with_settings(config, pooler_config or {})


def _of_architecture(used: Convert, architecture: str, family: str, hf_config: HFConfig) -> PoolingConfig:
    """The configuration by the architecture and its config.json alone."""
    labels = 0 if used == "embed" else _num_labels(hf_config, architecture)
    return PoolingConfig(
        convert=used,
        family=family,
        tasks=_tasks(used, family),
        kinds=(_default_kind(used, family, hf_config),),
        activation=_activation(used, architecture, hf_config, labels),
        is_causal=_is_causal(architecture, family, hf_config),
        num_labels=labels,
        matryoshka=_matryoshka(hf_config),
    )


def limit_length(
    length: Explained[int], asked: int | None, pooling: PoolingConfig, hf_config: HFConfig
) -> Explained[int]:
    """The longest prompt: as resolved, but within the table of positions and sentence-transformers' own limit."""
    if pooling.family in POSITIONS_AFTER_PADDING and asked is None:
        usable = int(hf_config.max_position_embeddings) - int(hf_config.get("pad_token_id", 1)) - 1
        if usable < length.value:
            length = Explained(
                usable, "max_position_embeddings in config.json, less those up to the padding token's id"
            )
    if asked is None and 0 < pooling.max_length < length.value:
        length = Explained(pooling.max_length, "max_seq_length in sentence-transformers' file")
    return length


def _refuse_pooling(architecture: str, own: Convert | None, asked: Convert | None) -> None:
    if own is not None:
        raise ConfigError(
            f"runner='generate': {architecture} has no head that generates; use runner='pooling' or leave it out",
            setting="runner",
        )
    if asked is not None:
        raise ConfigError(f"convert={asked!r} needs runner='pooling', not 'generate'", setting="convert")


def _refuse_both_directions(hf_config: HFConfig) -> None:
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if hf_config.get(name) is value:
            raise ConfigError(
                f"{name}={str(value).lower()} in config.json: tokens see later ones, and nothing can be generated; known: "
                f"{str(not value).lower()}, or runner='pooling'",
                setting="runner",
            )


def _tasks(convert: Convert, family: str) -> tuple[str, ...]:
    if convert == "embed":
        return (
            ("embed",) if family in PAIRED else ("token_embed",) if family in RETRIEVERS else ("embed", "token_embed")
        )
    if convert == "classify":
        return ("classify",) if family in ENCODERS else ("classify", "token_classify")
    return ("token_classify",)


def _default_kind(convert: Convert, family: str, hf_config: HFConfig) -> str:
    if convert == "classify" and family == "ModernBert":
        return str(hf_config.get("classifier_pooling", "cls"))
    if convert == "classify" and family in ENCODERS:
        return "cls"
    named = hf_config.get("pooling")
    if isinstance(named, str) and (kind := {"avg": "mean"}.get(named, named)) in KINDS:
        return kind
    return ENCODERS.get(family, "last")


def _is_causal(architecture: str, family: str, hf_config: HFConfig) -> bool:
    if family in ENCODERS:
        return family in ("Bert", *POSITIONS_AFTER_PADDING) and bool(hf_config.get("is_decoder", False))
    if "Bidirectional" in architecture or family == "ColPali":
        return False
    return hf_config.get("is_causal") is not False and not hf_config.get("use_bidirectional_attention", False)


def _num_labels(hf_config: HFConfig, architecture: str) -> int:
    """Transformers writes the labels' names, or nothing where there are two. Reward models have one number, or two a step."""
    if architecture.endswith("RewardModel"):
        return 2 if "Process" in architecture else 1
    tokens = hf_config.get("classifier_from_token")
    if is_sequence(tokens) and len(tokens) == 2 and hf_config.get("method", TWO_WAY) == TWO_WAY:
        return 1  # the softmax of two logits is the sigmoid of their difference
    labels = hf_config.to_dict().get("id2label") or hf_config.to_dict().get("label2id")
    return int(hf_config.get("num_labels") or (len(labels) if is_dict(labels) else 2))


def _activation(convert: Convert, architecture: str, hf_config: HFConfig, num_labels: int) -> str:
    if convert == "embed":
        return "normalize"
    if convert == "reward":
        return "softmax" if "ProcessReward" in architecture else "none"
    nested = hf_config.to_dict().get("sentence_transformers")
    named = (nested.get("activation_fn") if is_dict(nested) else None) or hf_config.get(
        "sbert_ce_default_activation_function"
    )
    if isinstance(named, str):
        kind = _ACTIVATIONS.get(named.rpartition(".")[2].lower())
        if kind is None:
            raise ConfigError(
                f"config.json names the activation {named!r}; known: {', '.join(_ACTIVATIONS)}", setting="model"
            )
        return kind
    by_problem = _PROBLEMS.get(str(hf_config.get("problem_type", "")))
    return by_problem or ("sigmoid" if num_labels == 1 else "softmax")


def _matryoshka(hf_config: HFConfig) -> tuple[int, ...]:
    dimensions = hf_config.get("matryoshka_dimensions")
    if is_sequence(dimensions):
        return tuple(int(dimension) for dimension in dimensions)
    return (0,) if hf_config.get("is_matryoshka", False) else ()


# --- what sentence-transformers writes ---


def _sbert_modules(path: str) -> list[tuple[str, str]]:
    """(class, folder) of each module; empty where there is no modules.json."""
    name = os.path.join(path, "modules.json")
    if not os.path.isfile(name):
        return []
    modules = read_json(name, setting="model")
    if not is_sequence(modules) or not all(is_dict(module) for module in modules):
        raise ConfigError(f"{name!r} must hold a JSON list of objects", setting="model")
    return [(str(m.get("type", "")).rpartition(".")[2], str(m.get("path", ""))) for m in modules if is_dict(m)]


def _with_modules(config: PoolingConfig, path: str, modules: list[tuple[str, str]]) -> PoolingConfig:
    dense: list[DenseConfig] = []
    kinds, activation = config.kinds, "none"
    for kind, folder in modules:
        if kind == "Pooling":
            kinds = _sbert_kinds(read_json_object(os.path.join(path, folder, "config.json"), setting="model"))
        elif kind == "Dense":
            dense.append(_dense(path, folder))
        elif kind == "Normalize":
            activation = "normalize"
        elif kind not in ("Transformer", "Dropout"):
            raise ConfigError(
                f"modules.json has a module of type {kind!r}; known: Transformer, Pooling, Dense, Normalize, Dropout",
                setting="model",
            )
    return dataclasses.replace(config, kinds=kinds, activation=activation, dense=tuple(dense))


def _sbert_kinds(values: dict[str, Any]) -> tuple[str, ...]:
    named = values.get("pooling_mode")
    names = [named] if isinstance(named, str) else named
    if is_sequence(names):
        kinds = tuple(_SBERT_NAMES.get(str(name), str(name)) for name in names)
    else:
        kinds = tuple(kind for key, kind in _SBERT_MODES.items() if values.get(key) is True)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ConfigError(
            f"the Pooling module's config.json asks for {', '.join(unknown) or 'no pooling'}; known: {', '.join(KINDS)}",
            setting="model",
        )
    return kinds


def _dense(path: str, folder: str) -> DenseConfig:
    values = read_json_object(os.path.join(path, folder, "config.json"), setting="model")
    activation = str(values.get("activation_function", "Identity")).rpartition(".")[2].lower()
    return DenseConfig(
        folder, int(values["in_features"]), int(values["out_features"]), bool(values.get("bias", True)), activation
    )


def _sbert_settings(path: str) -> dict[str, Any]:
    found = [name for name in _SBERT_FILES if os.path.isfile(os.path.join(path, name))]
    values = read_json_object(os.path.join(path, found[0]), setting="model") if found else {}
    prompts = read_json_object_if_there(os.path.join(path, "config_sentence_transformers.json"), setting="model")
    named = prompts.get("prompts")
    return {
        "max_length": int(values.get("max_seq_length") or 0),
        "lower_case": bool(values.get("do_lower_case", False)),
        "prompts": {str(name): str(text) for name, text in named.items()} if is_dict(named) else {},
    }


# --- what the user sets ---


def _with_settings(config: PoolingConfig, given: Mapping[str, Any]) -> PoolingConfig:
    """The configuration with the values of `pooler_config`."""
    given = {name: value for name, value in given.items() if name not in _AT_DEFAULT or value != _AT_DEFAULT[name]}
    asked = read_object(PoolerConfig, "pooler_config", given)
    changes: dict[str, Any] = {
        name: value for name in ("dimensions", "step_tag_id") if (value := getattr(asked, name)) is not None
    }
    kind = (asked.seq_pooling_type or asked.pooling_type or "").lower()
    if kind in PER_TOKEN:  # an older spelling of the tasks that give something for every token
        changes["tasks"] = tuple(task for task in config.tasks if task.startswith("token_"))
    elif kind:
        changes["kinds"] = (kind,)
    if asked.task is not None:
        allowed = f"one that the model does: {', '.join(config.tasks)} (runner and convert choose)"
        Check(allowed, config.tasks.__contains__)("pooler_config.task", asked.task)
        changes["tasks"] = (asked.task,)
    if asked.use_activation is not None:
        usual = "normalize" if config.embeds else "softmax"
        own = config.activation if config.activation != "none" else usual
        changes["activation"] = own if asked.use_activation else "none"
    if asked.returned_token_ids is not None:
        changes["returned_token_ids"] = tuple(asked.returned_token_ids)
    for name in ("enable_chunked_processing", "max_embed_len"):
        if getattr(asked, name) and not config.embeds:
            raise ConfigError.of("pooler_config", f"{name} is for embeddings; the model runs as {config.convert!r}")
    in_pieces, max_embed_len = bool(asked.enable_chunked_processing), asked.max_embed_len or 0
    return dataclasses.replace(config, in_pieces=in_pieces, max_embed_len=max_embed_len, **changes)
