"""Engine settings as command-line flags: dashes or underscores, human-readable numbers, JSON and dotted keys.

Knows argparse. What the settings mean stands in `arg_utils`; what they may be in `arg_checks`.
"""

import argparse
import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from quire.engine import arg_file
from quire.engine.arg_unavailable import ALIASES, UNAVAILABLE
from quire.errors import ConfigError

GROUPS = {
    "model": "Model",
    "load_format": "Loading",
    "block_size": "KV cache",
    "pipeline_parallel_size": "Parallel",
    "max_num_batched_tokens": "Scheduler",
    "device": "Device",
    "disable_log_stats": "Observability",
}
"""The field that opens each group of flags, in the order of the fields."""

SHORT = {
    "quantization": ("-q",),
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "enable_expert_parallel": ("-ep",),
}

HELP = {
    "model": "a local folder or a hub id; none means the built-in demo model",
    "tokenizer": "folder or hub id of the tokenizer, if it is not the model's",
    "tokenizer_mode": "auto, hf or slow",
    "skip_tokenizer_init": "token ids in, token ids out",
    "trust_remote_code": "accepted for compatibility; code of a checkpoint is never run",
    "dtype": "auto, float32, float16 or bfloat16",
    "seed": "seed of random weights and of requests without one",
    "max_model_len": "tokens a request may have in all, for example 32k",
    "served_model_name": "names under which the server knows the model",
    "revision": "branch, tag or commit at the hub",
    "hf_overrides": "JSON object of values that replace those of config.json",
    "rope_scaling": "JSON object that replaces config.json's",
    "rope_theta": "replaces config.json's",
    "quantization": "format of matrices: fp8, int8 and int4 round a plain checkpoint's at load; a stored one's is found",
    "model_impl": "quire (a spec), transformers (its modules, our attention), or auto: a spec where there is one",
    "enforce_eager": "record no steps",
    "deterministic": "a request's logits are the same to the bit alone and in any batch, at some cost in speed",
    "max_logprobs": "most logprobs a request may ask for; -1 means the whole vocabulary",
    "logprobs_mode": "raw_logprobs or processed_logprobs (after penalties and temperature)",
    "generation_config": "auto (the model's), quire (none), or a folder",
    "override_generation_config": "JSON object of sampling defaults",
    "chat_template": "a file or a template, in place of the model's",
    "logits_processors": "class paths of the engine's logits processors",
    "runner": "auto, generate or pooling (embeddings, classes, scores)",
    "convert": "what a pooling model gives: auto (as its architecture), embed, classify or reward",
    "task": "older spelling of runner and convert: generate, embed, classify, score or reward",
    "pooler_config": 'JSON object: how to pool, for example {"seq_pooling_type": "MEAN", "use_activation": false}',
    "load_format": "auto, safetensors, pt (pickled tensors), sharded_state (saved by Quire) or dummy (random weights)",
    "download_dir": "where downloads are kept",
    "ignore_patterns": "file name patterns not to read",
    "block_size": "tokens a KV-cache page (16)",
    "gpu_memory_utilization": "share of the device's memory to use",
    "kv_cache_memory_bytes": "size of the KV cache, for example 2G",
    "num_gpu_blocks_override": "number of KV-cache pages",
    "swap_space": "GiB of host memory for swapped pages",
    "kv_cache_dtype": "auto (the model's), float32, float16, bfloat16, or fp8 (e4m3) on devices that have it",
    "enable_prefix_caching": "keep pages of finished prompts for reuse (on)",
    "prefix_caching_hash_algo": "blake2b or sha256",
    "kv_events_config": 'JSON object, {"enable_kv_cache_events": true} turns events on',
    "distributed_executor_backend": "uni, mp, ray, external_launcher or a class path",
    "worker_cls": "class path of the worker",
    "max_num_batched_tokens": "tokens a step, for example 8k",
    "max_num_seqs": "requests that run at once",
    "scheduling_policy": "fcfs, priority or fair",
    "enable_chunked_prefill": "split long prompts over steps (on)",
    "preemption_mode": "recompute or swap, when pages run out",
    "async_scheduling": "plan a step before the last one's tokens are known",
    "scheduler_cls": "class path of the scheduler",
    "long_prefill_token_threshold": "most tokens a step for one prefill; 0 means no limit",
    "max_num_partial_prefills": "prompts that may be part-way through at once; 0 means no limit",
    "max_step_ms": "size a step so that it is predicted to take at most this long; 0 turns it off",
    "max_num_waiting": "requests that may wait; 0 means the built-in limit",
    "max_waiting_tokens": "prompt tokens that may wait; 0 means the built-in limit",
    "device": "auto, cpu, or a platform plugin's name",
    "cpu_threads": "threads on a CPU; 0 means all cores this process may use",
    "attention_backend": "an attention backend's name; none lets the platform choose",
    "disable_log_stats": "no lines of figures in the log",
    "enable_log_requests": "log each request's id and parameters",
}

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int:
    """`4096`, `4k` (4,000), `4K` (4,096), `1.5M`.

    Raises:
        argparse.ArgumentTypeError: anything else, or a fraction of one.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if match:
        whole, _, fraction = match[1].partition(".")
        scaled = int(whole + fraction) * _SUFFIXES[match[2]]
        value, rest = divmod(scaled, 10 ** len(fraction))
        if not rest:
            return value
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a whole number (4096, 4k = 4000, 4K = 4096 and 1.5M are such numbers)"
    )


def json_object(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return typing.cast("dict[str, Any]", value)


class ArgumentParser(argparse.ArgumentParser):
    """As argparse's, and: `--max_model_len` is `--max-model-len`; `--hf-overrides.rope.factor 2` sets a key of a JSON
    option; a wrong flag gets a hint; nothing is guessed from a flag's first letters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        import sys

        given = self._normalise(list(sys.argv[1:] if args is None else args))
        path = arg_file.named_file(given) if arg_file.FLAG in self._option_string_actions else None
        if path is not None:
            arg_file.apply_file(self, self._option_string_actions, path)
        return super().parse_known_args(given, namespace)

    def _normalise(self, args: list[str]) -> list[str]:
        flags: set[str] = set(self._option_string_actions)
        plain: list[str] = []
        dotted: dict[str, dict[str, Any]] = {}
        index = 0
        while index < len(args):
            arg = args[index]
            index += 1
            if arg == "--":
                plain += args[index - 1 :]
                break
            name, has_value, value = arg.partition("=")
            if not name.startswith("--"):
                plain.append(arg)
                continue
            base, _, path = name.partition(".")
            flag = base if base in flags else base.replace("_", "-")
            if path and flag in flags:
                if not has_value:
                    if index >= len(args):
                        self.error(f"argument {name}: expected one value")
                    value = args[index]
                    index += 1
                _set_path(dotted.setdefault(flag, {}), path, value)
                continue
            plain.append(f"{flag}{'.' + path if path else ''}{'=' + value if has_value else ''}")
        try:
            return _with_dotted(plain, dotted)
        except argparse.ArgumentTypeError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Refuse in the command line's one form."""
        raise ConfigError(message + self._hint(message))

    def _hint(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            return f" (see `{self.prog} --help`)"
        flag = unknown[1].split("=")[0]
        if flag.lstrip("-").split(".")[0].replace("-", "_") in UNAVAILABLE:
            return f" ({flag} is not available yet in Quire; leave it out)"
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f" (did you mean {near[0]}?)" if near else f" (see `{self.prog} --help`)"


def _set_path(target: dict[str, Any], path: str, text: str) -> None:
    """Set a nested key; the value is JSON where it reads as such, else a string."""
    *parents, last = path.split(".")
    for parent in parents:
        inner = target.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path!r}: {parent!r} is given both as a value and as an object")
        target = typing.cast("dict[str, Any]", inner)
    try:
        target[last] = json.loads(text)
    except ValueError:
        target[last] = text


def _with_dotted(args: list[str], dotted: dict[str, dict[str, Any]]) -> list[str]:
    for flag, values in dotted.items():
        for index, arg in enumerate(args):
            if arg == flag and index + 1 < len(args):
                args[index + 1] = json.dumps({**json_object(args[index + 1]), **values})
                break
            if arg.startswith(flag + "="):
                args[index] = f"{flag}={json.dumps({**json_object(arg.partition('=')[2]), **values})}"
                break
        else:
            # In front, where no positional list can swallow it.
            args = [f"{flag}={json.dumps(values)}", *args]
    return args


def add_engine_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """A flag for every field of a dataclass of settings, in groups."""
    hints = typing.get_type_hints(cls)
    if arg_file.FLAG not in parser._option_string_actions:
        arg_file.add_config_flag(parser)
    group: Any = parser
    taken: set[str] = {action.dest for action in parser._actions}
    for field in dataclasses.fields(cls):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        if field.name in taken or field.name == "placement_group":
            continue  # the caller has its own (a positional model, for example), or no text could say it
        default = field.default_factory() if callable(field.default_factory) else field.default
        group.add_argument(*_flag_names(field.name), **_flag_options(field.name, hints[field.name], default))


def _flag_names(name: str) -> list[str]:
    others = [f"--{alias.replace('_', '-')}" for alias, field in ALIASES.items() if field == name]
    return [f"--{name.replace('_', '-')}", *others, *SHORT.get(name, ())]


def _flag_options(name: str, hint: Any, default: Any) -> dict[str, Any]:
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    options: dict[str, Any] = {"default": default, "dest": name, "help": HELP.get(name, "as in vLLM")}
    if default not in (None, "", False, {}):
        options["help"] += f" (default: {default})"
    if bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
        return options
    kind = _converter(kinds)
    if any(typing.get_origin(kind) is list for kind in kinds):
        options.update(nargs="+", metavar="TEXT")
    else:
        options.update(type=kind, metavar=_METAVARS.get(kind, "TEXT"))
    return options


def _converter(kinds: set[Any]) -> Callable[[str], Any]:
    if any(typing.get_origin(kind) is dict for kind in kinds):
        return json_object
    for kind, convert in ((int, human_int), (float, float)):
        if kind in kinds:
            return convert
    return str


_METAVARS: dict[Callable[[str], Any], str] = {json_object: "JSON", human_int: "N", float: "X"}
