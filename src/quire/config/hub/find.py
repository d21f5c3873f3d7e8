"""Finds a model (a local folder, a file, or a name at a hub) and returns a local folder with its files.

A repository is listed once, at one commit. Its description (configuration, tokenizer, templates) is fetched at once; its
weights are fetched by `fetch_weights`, after all that can be refused was refused. `checkpoint_files` decides which files are
needed, `HuggingFaceHub` and `ModelScopeHub` know where they come from.
"""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from quire import envs
from quire.config.checkpoint_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    PARAMS,
    description_files,
    index_name,
    weight_files,
)
from quire.config.files import read_json, read_json_object
from quire.config.gguf.choice import choose_gguf, split_name
from quire.config.gguf.folder import BESIDE, find_gguf, gguf_folder
from quire.config.hub.download import Hub, amount, fetch_files, plan_line
from quire.config.hub.huggingface import HuggingFaceHub
from quire.config.hub.listing import HubFile, HubModel, HubSettings, Listing
from quire.config.hub.modelscope import ModelScopeHub
from quire.errors import ConfigError
from quire.logger import init_logger

logger = init_logger(__name__)

DEMO_MODEL = "quire-demo"
"""The demo model, which is also used if no model is named."""
BUILT_IN = {DEMO_MODEL: "demo", "quire-demo-vision": "demo_vision", "quire-demo-speech": "demo_speech"}
"""The folders of the models that are part of an installation, by the names that they have."""


class FoundModel(NamedTuple):
    """`path`: the local folder that holds config.json. `hub`: where the weights come from; None where they are here."""

    path: str
    hub: HubModel | None = None


def find_model(model: str, settings: HubSettings | None = None) -> FoundModel:
    """A model's folder with its description; nothing else is fetched, but a GGUF file, which has both in one.
    Raises ConfigError if there is no such folder or repository, if access is denied, or if it holds no model."""
    settings = settings or HubSettings()
    gguf = find_gguf(model)
    if gguf is not None:
        return FoundModel(gguf_folder(gguf))
    repository, wanted = split_name(model)
    if not wanted or os.path.exists(model):
        folder = _local_folder(model, "model")
        if folder is not None:
            _check_description(model, os.listdir(folder), folder, folder)
            return FoundModel(folder)
    hub = open_hub(settings)
    listing = _look_up(hub, repository, "model")
    if wanted or _is_gguf(listing, settings.load_format):
        return FoundModel(_fetch_gguf(hub, listing, wanted, settings))
    _fetch(hub, listing, description_files(listing.names), "model")
    _check_description(model, listing.names, listing.folder, f"the repository {listing.repository}")
    index = index_name(listing.names, settings.load_format)
    if index is not None:
        _fetch(hub, listing, [index], "model")
    return FoundModel(listing.folder, _weights_of(listing, settings))


def find_tokenizer(tokenizer: str, settings: HubSettings) -> str:
    """The folder with a tokenizer's files. Raises ConfigError as `find_model` does."""
    folder = _local_folder(tokenizer, "tokenizer")
    if folder is not None:
        return folder
    hub = open_hub(settings)
    listing = _look_up(hub, tokenizer, "tokenizer")
    _fetch(hub, listing, description_files(listing.names), "tokenizer")
    return listing.folder


def find_adapter(path: str, settings: HubSettings | None = None) -> str:
    """The local folder with an adapter, or its file: `path`, or what a hub has under `owner/name` or `owner/name/folder`, which
    is fetched. Raises ConfigError: there is neither."""
    if Path(path).expanduser().exists():
        return str(Path(path).expanduser())
    owner, _, rest = path.partition("/")
    name, _, inner = rest.partition("/")
    if not name or owner in ("", ".", "..", "~") or "\\" in path:
        raise ConfigError(
            f"lora_path={path!r}: no such folder; give the folder that PEFT saved, or a hub id such as 'owner/name'",
            setting="lora_path",
        )
    hub = open_hub(dataclasses.replace(settings or HubSettings(), revision=None))
    listing = _look_up(hub, f"{owner}/{name}", "lora_path")
    names = [f"{inner}/{file}" if inner else file for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    if absent := sorted(set(names) - set(listing.names)):
        found = ", ".join(sorted(listing.names)[:8]) or "nothing"
        raise ConfigError(
            f"lora_path={path!r}: the repository has no {absent[0]} (it holds {found}): PEFT saves it as safetensors",
            setting="lora_path",
        )
    _fetch(hub, listing, names, "lora_path")
    return os.path.join(listing.folder, inner) if inner else listing.folder


def fetch_weights(model: HubModel, settings: HubSettings) -> None:
    """Fetch the weights that are not here. Raises ConfigError if they cannot be fetched, or if the model has none to use."""
    if model.refusal:
        raise ConfigError(model.refusal, setting=model.refused_setting)
    missing = model.missing()
    if not missing:
        return
    hub, listing = open_hub(settings), model.listing
    if listing.is_local or hub.is_offline:
        names = [file.name for file in missing]
        raise ConfigError(
            f"model={listing.repository!r}: of {len(model.weights)} files with weights, {len(missing)} are not in the cache "
            f"{hub.cache} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}), and the hub cannot be asked: "
            f"{'unset HF_HUB_OFFLINE' if hub.is_offline else 'check the network'}, or give a local folder",
            setting="model",
        )
    logger.info("fetching %s", plan_line(hub, listing, missing))
    _fetch(hub, listing, [file.name for file in missing], "model", missing)


def describe_plan(model: HubModel, settings: HubSettings) -> dict[str, object]:
    """For `quire explain`: the repository, its commit, and what a start would fetch."""
    missing = model.missing()
    facts: dict[str, object] = {
        "repository": model.listing.repository,
        "commit": model.listing.commit,
        "folder": model.listing.folder,
        "weights": f"{len(model.weights)} files, {amount(sum(_size(model.listing, file) for file in model.weights))}",
        "to_fetch": "nothing" if not missing else plan_line(open_hub(settings), model.listing, missing),
    }
    return facts | ({"refused": model.refusal} if model.refusal else {})


def _size(listing: Listing, file: HubFile) -> int:
    path = listing.path(file.name)
    return file.size or (os.path.getsize(path) if os.path.exists(path) else 0)


def stored_types(model: HubModel, settings: HubSettings) -> list[str]:
    """What safetensors calls the types of the first file's tensors, where that file is still at the hub; one short request.
    Empty if the hub does not say."""
    files = [file for file in model.missing() if file.name.endswith(".safetensors")]
    if not files or model.listing.is_local:
        return []
    try:
        return open_hub(settings).stored_types(model.listing, files[0].name)
    except Exception:  # the client's own; the loader reads the header again, and says what is wrong with it
        return []


def open_hub(settings: HubSettings) -> Hub:
    """The hub that the environment names."""
    return ModelScopeHub(settings) if envs.QUIRE_USE_MODELSCOPE else HuggingFaceHub(settings)


def _local_folder(name: str, setting: str) -> str | None:
    """A folder of this machine; None if the name can only be a hub's. Raises ConfigError if it can be neither."""
    if not name:
        raise ConfigError(f"{setting}='' is empty; give a folder with config.json or a hub id", setting=setting)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if folder.is_file():
        raise ConfigError(
            f"{setting}={name!r} is a file; give the folder that holds config.json and the weights, or a .gguf file",
            setting=setting,
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith("/"):
        raise ConfigError(
            f"{setting}={name!r}: no such folder (looked for {str(folder.absolute())!r}); give an existing folder with "
            f"config.json, or a hub id such as 'owner/name'",
            setting=setting,
        )
    return built_in_folder(name)


def built_in_folder(name: str) -> str | None:
    """The folder of a model that is part of this installation; None if there is none of this name."""
    from importlib.resources import files

    if name not in BUILT_IN:
        return None
    folder = Path(str(files("quire"))) / "assets" / BUILT_IN[name]
    return str(folder) if (folder / CONFIG).is_file() else None


def _look_up(hub: Hub, repository: str, setting: str) -> Listing:
    """The files of a repository, from the hub, or from the cache if the hub cannot be reached.
    Raises ConfigError if both have none."""
    if hub.is_offline:
        listing = hub.find_cached(repository)
        if listing is None:
            raise ConfigError(
                f"{setting}={repository!r}: no such folder here, it is not in the cache {hub.cache}, and HF_HUB_OFFLINE "
                f"forbids the network. To fix: unset HF_HUB_OFFLINE to download it, or give a local folder",
                setting=setting,
            )
        return listing
    try:
        return hub.list_files(repository)
    except ConfigError:
        raise
    except Exception as error:  # the client's, of whatever library it uses
        why, remedy, is_final = hub.explain(repository, error)
        listing = None if is_final else hub.find_cached(repository)
        if listing is not None:
            logger.warning("%s: %s; the copy in the cache is used (%s)", repository, why, listing.commit[:12])
            return listing
        raise ConfigError(
            f"{setting}={repository!r}: no such folder here, so it was looked up at {hub.name}; {why}. To fix: {remedy}",
            setting=setting,
        ) from error


def _fetch(hub: Hub, listing: Listing, names: list[str], setting: str, files: tuple[HubFile, ...] = ()) -> None:
    """Fetch files, one sentence for what goes wrong."""
    if listing.is_local:
        return
    try:
        fetch_files(hub, listing, files or listing.find(names))
        hub.keep_revision(listing)
    except ConfigError:
        raise
    except Exception as error:  # the client's, of whatever library it uses
        files = files or listing.find(names)
        here, total = sum(hub.fetched_bytes(listing, file) for file in files), sum(file.size for file in files)
        why, remedy, _ = hub.explain(listing.repository, error, f"{amount(here)} of {amount(total)}")
        raise ConfigError(
            f"{setting}={listing.repository!r}: not all of its files could be fetched; {why}. What was fetched is kept. To "
            f"fix: {remedy}",
            setting=setting,
        ) from error


def _check_description(model: str, names: list[str], folder: str, where: str) -> None:
    """Raises ConfigError if the files are no checkpoint; the message says what they are."""
    if CONFIG in names or PARAMS in names:
        return
    if ADAPTER_CONFIG in names:
        base = read_json_object(os.path.join(folder, ADAPTER_CONFIG), setting="model").get("base_model_name_or_path")
        raise ConfigError(
            f"model={model!r} is an adapter (LoRA) of {base or 'a model that it does not name'}, and Quire runs whole "
            f"checkpoints: run {base or 'the base model'} without it, or merge them first (PEFT's merge_and_unload and "
            f"save_pretrained)",
            setting="model",
        )
    found = ", ".join(sorted(names)[:8]) or "nothing"
    raise ConfigError(
        f"model={model!r}: {where} has no config.json (it holds {found}); give a checkpoint in Hugging Face layout, a "
        f".gguf file, or of a repository with such files one of them, as 'owner/name:Q4_K_M'",
        setting="model",
    )


def _weights_of(listing: Listing, settings: HubSettings) -> HubModel:
    """The files with weights. Why there are none is kept until they are needed: `quire explain` needs none."""
    bare = dataclasses.replace(listing, files=())
    where = f"the cached copy of {listing.repository}" if listing.is_local else f"the repository {listing.repository}"

    def read_index(name: str) -> object:
        return read_json(listing.path(name), setting="model")

    try:
        names = weight_files(listing.names, settings.load_format, settings.ignore_patterns, read_index, where)
    except ConfigError as error:
        return HubModel(bare, (), str(error), error.setting or "model")
    return HubModel(bare, listing.find(names))


def _is_gguf(listing: Listing, load_format: str) -> bool:
    """Whether a repository that is named as a whole is one of GGUF files."""
    if load_format not in ("auto", "gguf") or not any(name.endswith(".gguf") for name in listing.names):
        return False
    return load_format == "gguf" or not any(name.endswith(".safetensors") for name in listing.names if "/" not in name)


def _fetch_gguf(hub: Hub, listing: Listing, wanted: str, settings: HubSettings) -> str:
    """The folder that is made of a GGUF file.
    Raises ConfigError if the repository does not have it, or if it is larger than this machine's memory."""
    parts = choose_gguf(listing.names, listing.repository, wanted)
    files = listing.find([*parts, *(name for name in BESIDE if name in listing.names)])
    size = sum(file.size for file in files)
    if settings.max_weight_bytes is not None and size > settings.max_weight_bytes:
        raise ConfigError(
            f"model={listing.repository!r}: {parts[0]} has {amount(size)}, and the memory {amount(settings.max_weight_bytes)}: "
            f"choose a smaller type of numbers",
            setting="model",
        )
    if not listing.is_local and listing.missing(files):
        logger.info("fetching %s", plan_line(hub, listing, listing.missing(files)))
    _fetch(hub, listing, [], "model", files)
    return gguf_folder(Path(listing.path(parts[0])), Path(listing.folder))
