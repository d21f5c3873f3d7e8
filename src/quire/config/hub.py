"""From what the user calls a model (a local folder or a hub id) to a local folder with its files.

Knows the hub's client and folders. Knows nothing of what the files mean. The client is imported only when an id has
to be looked up.
"""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import envs
from quire.config.gguf.folder import download_gguf, find_gguf, gguf_folder, names_hub_file
from quire.config.resolve import PARAMS
from quire.errors import ConfigError

CONFIG_PATTERNS = (
    *("config.json", PARAMS, "generation_config.json"),
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json"),
    *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "[0-9]_*/config.json"),
)
TOKENIZER_PATTERNS = ("*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken")
WEIGHT_PATTERNS = ("*.safetensors", "*.json")
SECOND_COPY = "consolidated*"
"""Weights in their author's own layout, beside the hub's."""
PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.json")


def resolve_model_path(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] = (),
    setting: str = "model",
) -> str:
    """The local folder that holds the files of `model`; downloads those that match `patterns` where it is a hub id.
    Raises ConfigError: no such folder or id, no access, or offline and not in the cache.

    Args:
        model: a local folder, or a hub id such as `owner/name`.
        revision: a branch, tag or commit of the hub's repository; not looked at for a folder.
        download_dir: where downloads are kept; None means the hub client's own cache.
        patterns: file name patterns to fetch; None means all.
        ignore_patterns: file name patterns not to fetch.
        setting: what an error calls the argument (`model`, `tokenizer`).
    """
    if not model:
        raise ConfigError(f"{setting}='' is empty; give a folder with config.json or a hub id", setting=setting)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if folder.is_file():
        raise ConfigError(
            f"{setting}={model!r} is a file; give the folder that holds config.json and the weights, or a .gguf file",
            setting=setting,
        )
    if _looks_like_path(model):
        raise ConfigError(
            f"{setting}={model!r}: no such folder (looked for {str(folder.absolute())!r}); give an existing folder with "
            f"config.json, or a hub id such as 'owner/name'",
            setting=setting,
        )
    return _download(model, revision, download_dir, patterns, ignore_patterns, setting)


def resolve_config_path(
    model: str, *, revision: str | None = None, download_dir: str | None = None, setting: str = "model"
) -> str:
    """The local folder that holds config.json of `model`; fetches nothing but the configuration files.
    Raises ConfigError: as `resolve_model_path`, or the folder has no config.json."""
    gguf = find_gguf(model)
    if gguf is None and not os.path.exists(model) and names_hub_file(model):
        gguf = download_gguf(model, lambda name, wanted: _download(name, revision, download_dir, wanted, (), setting))
    if gguf is not None:
        return gguf_folder(gguf)
    path = resolve_model_path(
        model, revision=revision, download_dir=download_dir, patterns=CONFIG_PATTERNS, setting=setting
    )
    if not any((Path(path) / name).is_file() for name in ("config.json", PARAMS)):
        found = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        raise ConfigError(
            f"{setting}={model!r}: {path!r} has no config.json (it holds {found}); give the folder of a checkpoint in "
            f"Hugging Face layout, a .gguf file, or of a repository with such files one of them, as 'owner/name:Q4_K_M'",
            setting=setting,
        )
    return path


def _looks_like_path(model: str) -> bool:
    """A hub id is `name` or `owner/name`; everything else can only be meant as a folder."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or model.endswith("/")


def _download(
    model: str,
    revision: str | None,
    download_dir: str | None,
    patterns: Sequence[str] | None,
    ignore_patterns: Sequence[str],
    setting: str,
) -> str:
    client = _modelscope(setting) if envs.QUIRE_USE_MODELSCOPE else importlib.import_module("huggingface_hub")
    try:
        return str(
            client.snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=None if patterns is None else list(patterns),
                ignore_patterns=list(ignore_patterns) or None,
            )
        )
    except (ValueError, OSError, RuntimeError) as error:  # the client's own errors all derive from these
        raise ConfigError(_explain_failure(model, revision, setting, error), setting=setting) from error


def _modelscope(setting: str) -> Any:
    try:
        return importlib.import_module("modelscope")
    except ImportError:
        raise ConfigError(
            "QUIRE_USE_MODELSCOPE is on, and ModelScope's client is not installed: pip install modelscope, or unset it",
            setting=setting,
        ) from None


def _explain_failure(model: str, revision: str | None, setting: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    at = f" at revision {revision!r}" if revision else ""
    tried = f"{setting}={model!r}: no such folder here, so it was looked up as a hub id{at}"
    remedy = "give a local folder, or check the spelling"
    offline: Any = constants.HF_HUB_OFFLINE
    if isinstance(error, errors.GatedRepoError):
        why, remedy = (
            "the hub wants you to accept the model's terms",
            "accept them there and log in with `hf auth login`",
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        why, remedy = "the repository exists but that revision does not", "check `revision`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        why, remedy = (
            "the hub has no such model, or it is private",
            "check the spelling, or log in with `hf auth login`",
        )
    elif isinstance(error, errors.HFValidationError):
        why, remedy = "that is not a valid hub id", "give a local folder, or a hub id such as 'owner/name'"
    elif offline:
        why = "it is not in the local cache, and HF_HUB_OFFLINE forbids the network"
        remedy = "unset HF_HUB_OFFLINE to download it, or give a local folder"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        why = "it is not in the local cache, and the hub cannot be reached"
        remedy = "check the network (HF_ENDPOINT chooses a mirror), or give a local folder"
    else:
        why = f"that failed with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return f"{tried}; {why}. To fix: {remedy}"
