"""Any causal language model that Transformers knows, alone or in a model that sees, with attention over our pages:
`model_impl="transformers"`.

The module tree and its arithmetic are Transformers'; attention, the KV cache and the linear layers are Quire's. What its
attention layers look like is found by running the tree once without memory (on torch's meta device). Slower than a spec:
every operation is PyTorch's, and steps are neither recorded nor captured.

Legend: T tokens, N query heads, K KV heads, H head size, D hidden, V vocabulary.
"""

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest
from quire.config.hf_config import HFConfig
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.errors import ConfigError
from quire.extras import import_optional
from quire.kernels.types import LinearWeight
from quire.layers.interface import CausalLM, MediaInputs, ModelContext, StepInputs
from quire.layers.parallel import ParallelPlan
from quire.layers.tower import Tower
from quire.layers.transformers_check import Given, Heads, check_tree, failure, in_one_line, refusal
from quire.layers.vision.no_eyes import without_timm

ATTENTION = "quire"
"""Our name among Transformers' attention implementations."""


_HARMLESS = frozenset(
    (
        "dropout",
        "is_causal",
        "position_ids",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "use_cache",
        "return_dict",
        "deterministic",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    )
)
"""Arguments of Transformers' attention functions that do not change the result of causal attention."""

OTHER_KINDS = {
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "encoder-decoder models need a spec",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "models that read images need a spec",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "models that read images, audio or video need a spec",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "encoder-decoder models need a spec",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked language models generate no text",
}
"""Transformers' tables of models that are no causal language models, and what the refusal says of them."""


class _Unsupported(Exception):
    """What paged attention cannot do of what a model's code asks for; the words are for users."""


class TransformersModel(CausalLM):
    """A module tree of Transformers that runs on pages.

    Attributes:
        hidden: columns of an embedding.
        towers: what its images are read by.
    """

    can_replay = False

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self.attention_backend = context.backend
        self._heads = _heads_of(_key(context.hf))
        self._layers = [_Layer(heads, context) for heads in self._heads]
        self.hidden, vocab = _sizes_of(_key(context.hf))
        self._hidden_TD = torch.empty(0, self.hidden, device=context.device)
        self._logits_SV = torch.zeros(context.max_logits, vocab, device=context.device)
        self.towers: Mapping[str, Tower] = {}
        self._tree: Any = None
        self._body: Any = None
        self._media: MediaInputs | None = None
        self._given = Given()
        self._linear_bytes = 0

    @classmethod
    def attention_requests(
        cls, hf: HFConfig, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        kind = _class_of(config := _config(_key(hf)))
        if kind is None or (_sees(kind) and hf.get("vision_config") is None):
            refuse_other_kinds(hf)
            raise refusal(config, "Transformers has no causal language model of this type")
        if plan.size > 1:
            _check_plan(hf)
        requests = [
            AttentionRequest(
                num_heads=plan.share(heads.heads, "heads"),
                num_kv_heads=plan.share(heads.kv_heads, "KV heads"),
                head_dim=heads.head_dim,
                kv_dtype=kv_dtype,
                block_size=block_size,
                window=heads.window,
                soft_cap=heads.soft_cap,
                has_sinks=heads.has_sinks,
                deterministic=deterministic,
            )
            for heads in _heads_of(_key(hf))
        ]
        return list(dict.fromkeys(requests))

    @property
    def buffer_bytes(self) -> int:
        return self._logits_SV.nbytes

    def describe(self) -> dict[str, Any]:
        tree = self._tree if self._tree is not None else _skeleton(_key(self.context.hf))
        own = sum(tensor.numel() for tensor in tree.parameters())
        own += sum(tower.own_parameters for tower in self.towers.values()) if self._tree is not None else 0
        plain = own * (self.context.activation_dtype if self._tree is not None else self.context.dtype).itemsize
        return {
            "implementation": f"transformers: {type(tree).__name__}",
            "parameters": own + self._linear_bytes // self.context.dtype.itemsize,
            "weight_bytes": plain + self._linear_bytes,
            "workspace_bytes": self.buffer_bytes,
            "hidden": self.hidden,
            "dtype": str(self.context.dtype).removeprefix("torch."),
            "quantization": self.context.linear_method.name,
            "layers": len(self._layers),
            "kv_bytes_per_token": sum(spec.bytes_per_token for spec in self.kv_cache_specs()),
        }

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [layer.kv_cache_spec() for layer in self._layers]

    def bind_kv_cache(self, kv_caches: list[torch.Tensor], group_of_layer: list[int]) -> None:
        for layer, kv_cache, group in zip(self._layers, kv_caches, group_of_layer, strict=True):
            layer.kv_cache, layer.group = kv_cache, group

    def parts(self) -> Iterator[object]:
        yield from (*super().parts(), *self.towers.values())

    # Weights.

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Transformers reads the checkpoint itself, since only it knows how names became modules; `weights` is not used.

        Raises:
            ConfigError: Transformers cannot read it, or names are missing or unknown (both lists).
        """
        context, config = self.context, _config(_key(self.context.hf))
        kind = _class_of(config)
        try:
            tree, report = kind.from_pretrained(
                context.path,
                config=_taken_by(kind, config),
                attn_implementation=_attention_of(config),
                dtype=context.dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # a model's own code may raise anything
            raise ConfigError(
                f"Transformers cannot load {context.path!r}: {in_one_line(error)}", setting="model"
            ) from error
        lists = {name: sorted(map(str, report.get(f"{name}_keys") or ())) for name in ("missing", "unexpected")}
        if lists["missing"] or report.get("mismatched_keys"):
            raise ConfigError(
                f"the checkpoint's weights are not this architecture's. Missing: {lists['missing'][:20]}. Unexpected: "
                f"{lists['unexpected'][:20]}. Of another shape: {report.get('mismatched_keys') or []}",
                setting="model",
            )
        self._take(tree)

    def load_dummy(self) -> None:
        torch.manual_seed(self.context.seed)
        config = _config(_key(self.context.hf))
        try:
            tree = _new_tree(config, self.context.dtype)
        except Exception as error:  # a model's own code may raise anything
            raise refusal(config, failure(error)) from error
        self._take(tree)

    def _take(self, tree: Any) -> None:
        """Check the tree, put our layers in place of its own, and move the rest to the device."""
        check_tree(tree.eval(), self._heads, ATTENTION)
        body = _only_text(tree)
        context, plan = self.context, self.context.plan
        shards = _shards(context.hf) if plan.size > 1 else {}
        prefix = tree.base_model_prefix
        names = [name for name, module in tree.named_modules() if isinstance(module, torch.nn.Linear)]
        tied = tree.get_output_embeddings()
        widest = max((tree.get_submodule(name).in_features for name in names), default=0)
        context.linear_method.reserve(context.max_tokens, widest, context.device)
        for name in names:
            linear = tree.get_submodule(name)
            if linear is tied and linear.weight is tree.get_input_embeddings().weight:
                continue
            within = name.removeprefix(f"{prefix}.")
            shard = next((kind for pattern, kind in shards.items() if fnmatch.fnmatchcase(within, pattern)), "none")
            replaced = _Linear(linear, shard, context)
            self._linear_bytes += context.linear_method.weight_bytes(
                [name], replaced.out_features, replaced.in_features, context.dtype
            )
            tree.set_submodule(name, replaced)
        tree = tree.to(device=context.device, dtype=context.activation_dtype).eval().requires_grad_(False)
        for layer, heads in zip(self._layers, self._heads, strict=True):
            tree.get_submodule(heads.module).quire_layer = layer
        self._tree, self._body = tree, body
        tree.get_decoder().register_forward_pre_hook(self._place, with_kwargs=True)
        setattr(tree, prefix, self._given)

    # One step.

    @torch.no_grad()
    def forward(self, step: StepInputs) -> torch.Tensor:
        count = step.num_tokens
        for layer in self._layers:
            layer.metadata = step.attention[layer.group]
        tokens, positions = step.input_ids[None, :count].long(), step.positions[None, :count].long()
        self._media = step.media
        self._hidden_TD = self._body(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state[0]
        return self._hidden_TD

    def _place(self, decoder: torch.nn.Module, args: Any, given: dict[str, Any]) -> None:
        """Before the layers of a model that also sees: put embeddings in their places."""
        if self._media is not None:
            self._media.place(given["inputs_embeds"][0])

    def compute_hidden(self, step: StepInputs) -> torch.Tensor:
        return self._hidden_TD

    @torch.no_grad()
    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        """The tree's own head, with whatever it does to logits, over hidden states that are given to it."""
        index = step.logits_index[: step.num_logits].long()
        self._given.hidden = self._hidden_TD[index][None]
        logits_SV = self._tree(input_ids=index[None], use_cache=False).logits[0]
        out_SV = self._logits_SV[: step.num_logits]
        out_SV.copy_(logits_SV)
        return out_SV


def _only_text(tree: Any) -> torch.nn.Module:
    """What computes hidden states; of a model that sees, parts that make no embeddings of tokens are left out of the tree."""
    body = getattr(tree, tree.base_model_prefix)
    if not _sees(body):
        return body
    decoder = body.get_decoder()
    for name, part in list(body.named_children()):
        if not any(module is decoder for module in part.modules()) and not name.startswith("embed_"):
            setattr(body, name, torch.nn.Identity())
    return body


class _Linear(torch.nn.Module):
    """A rank's share of a matrix, through the `LinearMethod`."""

    def __init__(self, linear: torch.nn.Linear, shard: str, context: ModelContext) -> None:
        super().__init__()
        self._context, self._is_summed = context, shard == "rowwise"
        plan, (rows, columns) = context.plan, linear.weight.shape
        matrix = linear.weight.data
        bias = None if linear.bias is None else linear.bias.data
        if shard == "colwise":
            mine = plan.rows(rows, rows, "a matrix's rows")
            matrix, bias = matrix[mine], None if bias is None else bias[mine]
        elif shard == "rowwise":
            matrix = matrix[:, plan.columns(columns, columns, "a matrix's columns")]
            bias = bias if plan.rank == 0 else None
        method = context.linear_method
        matrix = matrix.to(context.device, context.dtype).contiguous()
        bias = None if bias is None else bias.to(context.device, torch.float32)
        self.weight: LinearWeight = method.create(matrix, bias, context.dtype)
        self.in_features, self.out_features = self.weight.in_features, self.weight.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        out_TN = torch.empty(len(x_TK), self.out_features, dtype=x.dtype, device=x.device)
        self._context.linear_method.apply(x_TK, self.weight, out_TN)
        if self._is_summed:
            self._context.communicator.all_reduce(out_TN)
        return out_TN.view(*x.shape[:-1], -1)


class _Layer:
    """One attention layer's pages and constants."""

    def __init__(self, heads: Heads, context: ModelContext) -> None:
        self._backend, self._context, self._heads = context.backend, context, heads
        self.params = AttentionParams(
            num_heads=context.plan.share(heads.heads, "heads"),
            num_kv_heads=context.plan.share(heads.kv_heads, "KV heads"),
            head_dim=heads.head_dim,
            scale=heads.scale,
            window=heads.window,
            soft_cap=heads.soft_cap,
            deterministic=context.deterministic,
        )
        self.kv_cache: torch.Tensor = torch.empty(0)
        self.group = 0
        self.metadata: AttentionMetadata | None = None

    def kv_cache_spec(self) -> KVCacheSpec:
        params, dtype = self.params, self._context.kv_dtype
        return KVCacheSpec(
            kind=KVKind.SLIDING_WINDOW if params.window else KVKind.FULL,
            block_size=self._context.block_size,
            bytes_per_token=2 * params.num_kv_heads * params.head_dim * dtype.itemsize,
            num_kv_heads=params.num_kv_heads,
            head_dim=params.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            window=params.window,
        )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[1, N, T, H] and [1, K, T, H], rotated already, to [1, T, N, H]."""
        heads, params, metadata = self._heads, self.params, cast(AttentionMetadata, self.metadata)
        if heads.value_dim < heads.head_dim:
            value = torch.nn.functional.pad(value, (0, heads.head_dim - heads.value_dim))
        if sinks is not None and params.sinks is None:
            plan = self._context.plan
            mine = plan.groups(heads.heads, "heads")
            params = self.params = dataclasses.replace(params, sinks=sinks[mine].float().contiguous())
        qkv_TC = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (query, key, value)], dim=1)
        out_TC = torch.empty(len(qkv_TC), params.num_heads * params.head_dim, dtype=qkv_TC.dtype, device=qkv_TC.device)
        self._backend.attend(qkv_TC, self.kv_cache, metadata, params, out_TC, None)
        return out_TC.view(1, len(out_TC), params.num_heads, params.head_dim)[..., : heads.value_dim]


# What Transformers is asked before anything is loaded.


def _key(hf: HFConfig) -> str:
    return json.dumps(hf.to_dict(), sort_keys=True, default=str)


def _class_of(config: Any) -> Any:
    """Transformers' causal language model of this config's class, or else its model that also sees; None: it has neither."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    texts: Any = AutoModelForCausalLM._model_mapping
    if type(config) in texts:
        return texts[type(config)]
    seeing: Any = AutoModelForImageTextToText._model_mapping
    found = seeing.get(type(config), None)
    return found if _sees(found) else None


def _taken_by(kind: Any, config: Any) -> Any:
    """The config that a class takes: the text's alone, of a class that is a text model's."""
    return config.get_text_config() if kind.config_class is config.sub_configs.get("text_config") else config


def _new_tree(config: Any, dtype: torch.dtype) -> Any:
    kind = _class_of(config)
    return kind._from_config(_taken_by(kind, config), attn_implementation=_attention_of(config), dtype=dtype)


def _sees(kind: Any) -> bool:
    return hasattr(kind, "get_image_features")


def _attention_of(config: Any) -> str | dict[str, str]:
    """Our attention, where text is computed."""
    return {"text_config": ATTENTION} if _sees(_class_of(config)) else ATTENTION


def knows(hf: HFConfig) -> bool:
    """Whether Transformers is installed and has the causal language model that this config names."""
    try:
        kind = _class_of(_config(_key(hf)))
        name = "" if kind is None else kind.__name__
        # Transformers also lists models under other tables for their text; these are refused by what they are.
        is_text = not name.endswith("ForConditionalGeneration") and not _sees(kind)
        return is_text and name in (hf.get("architectures") or ())
    except (ImportError, ConfigError):
        return False


@functools.lru_cache(maxsize=2)
def _config(key: str) -> Any:
    """The config as Transformers' own class, with our attention.

    Raises:
        ConfigError: Transformers is not installed, or does not know the model type.
    """
    values = json.loads(key)
    transformers = import_optional(
        "transformers", "transformers", "model_impl", "model_impl='transformers' needs Transformers"
    )
    model_type = values.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"config.json's model_type={model_type!r} is not known to the installed Transformers; code from checkpoints is "
            f"not run",
            setting="model_impl",
        )
    transformers.AttentionInterface.register(ATTENTION, _attention)
    try:
        config = without_timm(transformers.CONFIG_MAPPING[model_type].from_dict(values))
    except Exception as error:  # a config class may raise anything
        raise ConfigError(
            f"config.json does not fit Transformers' {model_type!r}: {in_one_line(error)}", setting="model"
        ) from error
    config._attn_implementation = _attention_of(config)
    return config


def _sizes_of(key: str) -> tuple[int, int]:
    """(hidden size, vocabulary size) by the names that the config class has for them.

    Raises:
        ConfigError: it has none, or the model is one that `refuse_other_kinds` refuses.
    """
    config = _config(key)
    try:
        text = config.get_text_config()
        return int(text.hidden_size), int(text.vocab_size)
    except (AttributeError, TypeError) as error:
        raise refusal(config, str(error)) from error


def refuse_other_kinds(hf: HFConfig) -> None:
    """Raises ConfigError for an architecture of Transformers that is no causal language model, with the kind that it is."""
    try:
        from transformers.models.auto import modeling_auto
    except ImportError:
        return
    names = {name for name in hf.get("architectures") or () if not name.endswith(("ForCausalLM", "LMHeadModel"))}
    for table, kind in OTHER_KINDS.items():
        mapping = getattr(modeling_auto, table, {})
        if is_own := sorted(names & set(map(str, mapping.values()))):
            raise ConfigError(
                f"model architecture {is_own[0]!r} (model_type={hf.get('model_type')!r}) has no spec, and cannot run through "
                f"Transformers' modules: {kind}. Choose another model, or run this one with Transformers itself",
                setting="model",
            )


@functools.lru_cache(maxsize=1)
def _skeleton(key: str) -> Any:
    """The module tree without memory."""
    with torch.device("meta"):
        return _new_tree(_config(key), torch.bfloat16).eval()


@functools.lru_cache(maxsize=2)
def _heads_of(key: str) -> tuple[Heads, ...]:
    """Every attention layer, in the order of computation.

    Raises:
        ConfigError: Transformers has no such model, or one whose attention does not go through its interface.
    """
    config = _config(key)
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(config, "encoder-decoder models need a spec")
    if not getattr(config, "is_causal", True):
        raise refusal(config, "its attention looks ahead")
    text = config.get_text_config()
    layers = int(getattr(text, "num_hidden_layers", 0))
    others = sorted({*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"})
    if others:
        raise refusal(config, f"layer_types has {', '.join(others)}, which keep more of a request than keys and values")
    try:
        tree = _skeleton(key)
        found: list[Heads] = []
        names = {module: name for name, module in tree.named_modules()}
        for module in tree.modules():
            module.quire_found = found  # type: ignore[assignment]
            module.quire_names = names  # type: ignore[assignment]
        with torch.no_grad():
            tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
            tree(input_ids=tokens, position_ids=tokens, use_cache=False)
        for module in tree.modules():
            del module.quire_found, module.quire_names
    except Exception as error:  # a model's own code may raise anything
        raise refusal(config, _in_words(error)) from error
    if len({heads.module for heads in found}) < len(found):
        raise refusal(config, "it runs some layers several times for each token")
    if len(found) != layers:  # what other layers keep of a request is unknown here
        raise refusal(
            config,
            f"{len(found)} of its {layers} layers have attention of a kind that can keep keys and values in pages",
        )
    return tuple(found)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers calls in place of its own attention."""
    layer: _Layer | None = getattr(module, "quire_layer", None)
    if layer is not None:
        return layer.attend(query, key, value, s_aux), None
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise _Unsupported("its attention looks ahead")
    _refuse_more_than_heads(module, attention_mask, others)
    _refuse_hidden_window(module, sliding_window)
    module.quire_found.append(
        Heads(
            module=module.quire_names[module],
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=int(sliding_window or 0),
            soft_cap=float(softcap or 0.0),
            has_sinks=s_aux is not None,
        )
    )
    return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _refuse_more_than_heads(module: Any, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    """Raises _Unsupported for an argument that paged attention would ignore.

    Transformers builds no plain causal mask for an attention implementation that it does not know: a mask that arrives is
    the model's own.
    """
    given = {"attention_mask": attention_mask, **others}
    unknown = [
        name for name, value in given.items() if name not in _HARMLESS and value is not None and value is not False
    ]
    if unknown:
        raise _Unsupported(
            f"its {type(module).__name__} calls attention with {', '.join(sorted(unknown))}, which paged attention cannot apply"
        )


def _refuse_hidden_window(module: Any, sliding_window: int | None) -> None:
    """Raises _Unsupported for a layer of `layer_types` with a window that only its mask would apply."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    layer = getattr(module, "layer_idx", None)
    if isinstance(layer, int) and layer < len(kinds) and kinds[layer] == "sliding_attention" and not sliding_window:
        raise _Unsupported(
            f"layer {layer} is sliding_attention in layer_types, but its {type(module).__name__} calls attention without "
            f"sliding_window"
        )


def _in_words(error: Exception) -> str:
    """Why a run of a model's own code, over a tree without memory, ended in this error."""
    if isinstance(error, _Unsupported):
        return str(error)
    if isinstance(error, KeyError) and error.args == (ATTENTION,):
        return "its attention does not go through Transformers' attention interface"
    if "meta" in str(error):
        return "what its code computes depends on the values of its tensors, so that its layers cannot be listed beforehand"
    if "NoneType" in str(error):
        return "its code needs an attention mask or a cache of Transformers, which paged attention takes the place of"
    return failure(error)


def _shards(hf: HFConfig) -> dict[str, str]:
    """Which matrices are split how, from Transformers' own plan for the model."""
    return dict(getattr(_config(_key(hf)), "base_model_tp_plan", None) or {})


def _check_plan(hf: HFConfig) -> None:
    """Raises ConfigError where Transformers' plan splits something that is not a plain matrix."""
    shards = _shards(hf)
    others = sorted({kind for kind in shards.values() if kind not in ("colwise", "rowwise")})
    if not shards or others:
        why = f"splits {', '.join(others)}" if shards else "is absent"
        raise ConfigError(
            f"tensor_parallel_size > 1 with model_impl='transformers': Transformers' plan for this model {why}; only column "
            f"and row splits of matrices are supported",
            setting="tensor_parallel_size",
        )
