"""`quire compile-cache [MODEL …]`: compile a model's GPU kernels ahead of its first start, if asked into a folder to ship.

A list says which kernels a model needs. Every start writes one, and some come with the package. A model without a list is
started once, with random weights, which needs a GPU. Compiling from a list needs none.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from quire.engine.arg_parser import Flags, add_flags
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError, EngineError
from quire.kernels.triton.runtime import places
from quire.kernels.triton.runtime.places import Variant
from quire.platforms.host import usable_cpus
from quire.platforms.nvml import visible_gpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own: Flags = (
        (
            "models",
            None,
            "local folders or hub ids; none: every model that there is a list of",
            {"nargs": "*", "metavar": "MODEL"},
        ),
        (
            "--output",
            None,
            "a folder to ship; QUIRE_KERNEL_CACHE=DIR uses it (default: this user's own cache)",
            {"metavar": "DIR"},
        ),
        (
            "--capability",
            None,
            "compute capability, 90 for 9.0 (default: this machine's GPU, or else 90)",
            {"type": int},
        ),
        ("--processes", 0, "compilers that run at a time (default: one a core)"),
    )
    add_flags(parser, {"": own})
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    gpus = visible_gpus()
    capability = args.capability or (gpus[0].capability[0] * 10 + gpus[0].capability[1] if gpus else 90)
    given = EngineArgs.from_cli_args(args)
    names = [_list_of(dataclasses.replace(given, model=model), capability) for model in args.models]
    lists = {name: places.find_list(name) for name in names or _known_names(capability)}
    if not lists:
        raise ConfigError(
            f"no list of kernels for compute capability {capability} is known here: name a model, on a machine with a GPU",
            setting="MODEL",
        )
    folder = Path(args.output).expanduser() if args.output else places.writable_folder()
    return _compile(lists, capability, args.processes or usable_cpus(), folder)


def _known_names(capability: int) -> list[str]:
    files = {file.stem for folder in places.list_folders() for file in folder.glob(f"*-sm{capability}-*.json")}
    return sorted(files)


def _list_of(engine_args: "EngineArgs", capability: int) -> str:
    """The name of a model's list; one that is not there yet is made by a start.
    Raises ConfigError: there is neither a list nor a GPU."""
    from quire.kernels.triton.runtime.preparation import list_name

    config = dataclasses.replace(engine_args, load_format="dummy").create_engine_config()
    name = list_name(config, capability)
    if places.find_list(name):
        return name
    if not visible_gpus():
        raise ConfigError(
            f"there is no list of the kernels of {engine_args.model} ({name}): run this once on a machine with a GPU, or start "
            f"the model there and copy the folder 'kernels/lists' of its QUIRE_CACHE_ROOT",
            setting="MODEL",
        )
    print(f"{engine_args.model}: no list yet, starting it with random weights", file=sys.stderr)
    from quire import LLM

    LLM.from_engine_config(config).llm_engine.shutdown()
    if not places.find_list(name):
        raise EngineError(f"the start of {engine_args.model} left no list of kernels")
    return name


def _compile(lists: "dict[str, list[Variant]]", capability: int, processes: int, folder: Path) -> int:
    from quire.kernels.triton.runtime.ahead import CompilingProcess

    variants = places.merge(*lists.values())
    print(f"{len(variants)} kernels of {len(lists)} models, in {processes} processes, into {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    compiling = CompilingProcess(capability, processes, folder)
    compiling.add(variants)
    compiling.finish()
    compiling.wait()
    errors = dict(compiling.errors)
    compiling.close()
    for name, wanted in lists.items():
        good = [variant for variant in wanted if places.identity(variant) not in errors]
        places.write_list(folder / "lists" / f"{name}.json", good, is_current=places.is_current(name))
        if compiling.was_complete:
            (folder / places.stamp_name(good, capability)).touch()
        print(f"{name}: {len(good)} of {len(wanted)} kernels")
    for error in sorted(set(errors.values())):
        print(f"not compiled: {error}", file=sys.stderr)
    if not compiling.was_complete:
        raise EngineError("the compiling process ended before it was through; the log has its last words")
    return 1 if errors else 0
