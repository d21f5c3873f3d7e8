"""Eyes and ears of a model that Quire has no description of: Transformers' own modules, without the language model.

The whole model's code runs up to its language model, in whose place something stands that keeps what it is called with: the
embeddings, in which those of images are in place already. So whatever a model does between pixels and its language model
is done as Transformers does it. A language model that is called with more than embeddings is refused.
"""

import copy
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from quire.errors import ConfigError
from quire.extras import import_optional
from quire.layers.interface import ModelContext
from quire.layers.tower import Arrays, Tower
from quire.layers.transformers_check import failure, in_one_line
from quire.layers.vision.no_eyes import is_timms, without_timm

PLACES = "places"
"""What an item has besides its processor's arrays: which of its tokens are embeddings."""
TOKENS = "input_ids"
_HARMLESS = frozenset(
    (
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "cache",
        "past_key_values",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "cache_position",
        "logits_to_keep",
        "labels",
    )
)
"""What the decoder may be called with besides embeddings; masks and positions are looked at."""


class _Called(Exception):
    """The language model's turn has come. `given`: what it is called with."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


class _Numbers(torch.nn.Module):
    """In the place of the table of tokens: a row is its token's number, over and over, counted from `first` on."""

    weight: torch.Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.embedding_dim, self.first = columns, 0
        self.register_buffer("weight", torch.zeros(1), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (input_ids[..., None] + self.first).to(self.weight.dtype).repeat_interleave(self.embedding_dim, -1)


class _Ear(torch.nn.Module):
    """In the place of the language model: it hears what it would be called with."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.embed_tokens = config, _Numbers(config.hidden_size)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed_tokens

    def get_per_layer_inputs(self, input_ids: torch.Tensor) -> None:
        """What its layers read of tokens besides embeddings, which is not an item's."""

    def forward(self, input_ids: Any = None, **given: Any) -> None:
        raise _Called({"input_ids": input_ids} | given)


class BorrowedTower(Tower):
    """Transformers' modules of a model that sees, but for its language model.

    Args:
        is_random: its weights are drawn, not read.
        sees: it reads images.
        scale: of its rows, where the decoder does not scale what is given to it as its language model does.
    """

    prefix = "borrowed."

    def __init__(self, context: ModelContext, *, is_random: bool, scale: float = 1.0, sees: bool = True) -> None:
        self._context, self._is_random, self._scale = context, is_random, scale
        self._class, self._config = _without_text(json.dumps(context.hf.to_dict(), sort_keys=True, default=str), sees)
        self._tree: Any = None
        self.modules = []
        try:
            with torch.device("meta"):
                self.own_parameters = sum(
                    each.numel() for each in self._class(copy.deepcopy(self._config)).parameters()
                )
        except Exception as error:  # a model's own code may raise anything
            raise self._refusal(failure(error)) from error

    @property
    def buffer_bytes(self) -> int:
        return 0

    def post_load(self) -> None:
        """Read its weights, once.

        Raises:
            ConfigError: they are not there, or Transformers cannot read them.
        """
        if self._tree is not None:
            return
        tree = self._drawn() if self._is_random else self._read()
        tree = tree.to(device=self._context.device, dtype=self._context.activation_dtype)
        self._tree = tree.eval().requires_grad_(False)

    def _drawn(self) -> Any:
        torch.manual_seed(self._context.seed)
        return self._class._from_config(copy.deepcopy(self._config), dtype=self._context.dtype)

    def _read(self) -> Any:
        path = self._context.path
        try:
            tree, report = self._class.from_pretrained(
                path,
                config=self._config,
                dtype=self._context.dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # a model's own code may raise anything
            raise ConfigError(f"Transformers cannot load {path!r}: {in_one_line(error)}", setting="model") from error
        missing = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
        if missing:
            raise ConfigError(f"the checkpoint lacks weights of what sees: {', '.join(missing[:20])}", setting="model")
        return tree

    @torch.no_grad()
    def encode(self, items: Sequence[Arrays]) -> list[torch.Tensor]:
        return [self._rows(item, self._called(item)) for item in items]

    def _rows(self, item: Arrays, given: Mapping[str, Any]) -> torch.Tensor:
        places = torch.from_numpy(item[PLACES].copy()).to(self._context.device)
        return given["inputs_embeds"][0, places].to(self._context.activation_dtype) * self._scale

    def _called(self, item: Arrays) -> dict[str, Any]:
        """What the language model is called with for an item."""
        try:
            self._tree(**self._inputs(item), use_cache=False)
        except _Called as called:
            return called.given
        raise ValueError("it computes no embeddings for a language model")

    def _inputs(self, item: Arrays) -> dict[str, torch.Tensor]:
        """The arrays that the model's code has names for."""
        known = inspect.signature(self._class.forward).parameters
        tensors = {name: torch.from_numpy(array.copy()) for name, array in item.items() if name in known}
        dtype, device = self._context.activation_dtype, self._context.device
        return {
            name: each.to(device, dtype if each.is_floating_point() else None)  # type: ignore[arg-type]
            for name, each in tensors.items()
        }

    @torch.no_grad()
    def check(self, item: Arrays) -> None:
        """Raises ConfigError: what this item is for the decoder is more than its embeddings."""
        try:
            why = self._more_than_embeddings(item)
        except Exception as error:  # a model's own code may raise anything
            why = failure(error)
        if why:
            raise self._refusal(why)

    def _refusal(self, why: str) -> ConfigError:
        name, instead = self._class.__name__, "With language_model_only it reads text"
        return ConfigError(f"{name} cannot see through Transformers' modules: {why}. {instead}", setting="model")

    def _more_than_embeddings(self, item: Arrays) -> str:
        given, count = self._called(item), item[TOKENS].size
        more = [
            name for name, value in given.items() if name not in _HARMLESS and value is not None and value is not False
        ]
        if more:
            return f"its language model reads {', '.join(sorted(more))}, too"
        mask, positions, rows = (given.get(name) for name in ("attention_mask", "position_ids", "inputs_embeds"))
        if mask is not None and (isinstance(mask, dict) or mask.ndim > 2):
            return "its language model has a mask of its own"
        if positions is not None and positions.reshape(-1).tolist() != list(range(count)):
            return "the positions of its tokens are not their numbers"
        if rows is None:
            return "its language model is not given embeddings"
        is_text = torch.ones(count, dtype=torch.bool)
        is_text[torch.from_numpy(item[PLACES].copy())] = False
        tokens = torch.from_numpy(item[TOKENS].copy()).reshape(1, -1).to(rows.device)
        written = _Numbers(rows.shape[-1]).to(rows.device, rows.dtype)(tokens)
        same = (rows == written).all(-1)[0].cpu()
        if not bool((same == is_text).all()):
            return "other tokens than an image's have embeddings of their own, too"
        table = self._tree.get_input_embeddings()
        table.first = 1
        others = self._called(item)["inputs_embeds"]
        table.first = 0
        is_free = bool((rows == others).all(-1)[0].cpu()[~is_text].all())
        return "" if is_free else "the embeddings of its images depend on those of tokens"


@functools.lru_cache(maxsize=2)
def _without_text(key: str, sees: bool) -> tuple[Any, Any]:
    """The model's class without its language model, and its config.

    Raises:
        ConfigError: Transformers has no such model, or its eyes need a library that is not installed.
    """
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    values = json.loads(key)
    try:
        config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
        whole = cast(Any, AutoModelForImageTextToText)._model_mapping[type(config)]
    except Exception as error:  # a config class may raise anything
        raise ConfigError(f"config.json does not fit Transformers: {in_one_line(error)}", setting="model") from error
    if not sees:
        config = without_timm(config)
    elif is_timms(config):
        why = f"{whole.__name__} sees through timm (with limit_mm_per_prompt={{'image': 0}} it sees nothing)"
        import_optional("timm", "timm", "model", why)

    def make(self: Any, config: Any) -> None:
        whole.__init__(self, config)
        decoder, head = self.get_decoder(), self.get_output_embeddings()
        names = {module: name for name, module in self.named_modules()}
        self.set_submodule(names[decoder], _Ear(config.get_text_config()))
        if names.get(head) and not names[head].startswith(f"{names[decoder]}."):
            self.set_submodule(names[head], torch.nn.Identity())

    own = {"_tied_weights_keys": {}, "_keys_to_ignore_on_load_unexpected": [".*"], "__module__": whole.__module__}
    return type(whole.__name__, (whole,), own | {"__init__": make}), config
