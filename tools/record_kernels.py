#!/usr/bin/env python3
"""Writes the package's lists of kernels: what a start of each model launches on a GPU that need not be there.

A start is gone through on torch's meta device, with launches that only name what they would need (`KernelPreparation`). To be
run again when kernels or their sizes have changed; a list that is out of date costs compile time at a first start, no more.
Kernels that a list already has keep their order, unless --compile measures it again.

Usage: python tools/record_kernels.py MODEL... [--compile] [--output FOLDER] [--set quantization=fp8]
       MODEL is a folder with a config.json.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

GIB = 1 << 30


def imagine_gpu(name: str, capability: tuple[int, int], memory: int, processors: int, shared: int) -> None:
    """Have everybody who asks see one such GPU."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from quire.platforms import cuda, nvml

    gpu = nvml.Gpu(name, capability, memory)
    cuda.visible_gpus = lambda: (gpu,)
    cuda.why_unusable = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=processors)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            utils=SimpleNamespace(
                get_device_properties=lambda device: {"max_shared_mem": shared, "multiprocessor_count": processors}
            ),
        )
    )


def imagine_runner(config: Any, memory: int, rehearse: Callable[[Any, str], None]) -> Any:
    """The runner that a start makes, on torch's meta device.

    Args:
        memory: bytes that the GPU has.
        rehearse: is given what launches a step of every size, when buffers are there; and then what uses each feature, with the
            feature's name.

    Raises:
        Rehearsed: all is named.
    """
    import torch

    from quire.core.kv_planner import plan_kv_cache
    from quire.kernels.triton.runtime import cache
    from quire.platforms import current_platform
    from quire.platforms.interface import DeviceEvent, DeviceRuntime
    from quire.plugins.registry import import_class

    cache.install()

    class Event(DeviceEvent):
        def record(self) -> None: ...

        def wait(self) -> None: ...

        def milliseconds_since(self, earlier: DeviceEvent) -> float:
            return 0.0

    class Runtime(DeviceRuntime):
        def device(self) -> torch.device:
            return torch.device("meta")

        def synchronize(self) -> None: ...

        def memory_info(self) -> tuple[int, int]:
            return memory, memory

        def peak_memory(self) -> int:
            return 0

        def record(self, function: Any, num_tokens: int, num_logits: int) -> None:
            return None

        def event(self) -> DeviceEvent:
            return Event()

        loads_kernels_late = True

        def rehearse(self, launch_all: Any, *, feature: str = "") -> None:
            rehearse(launch_all, feature)

        def await_kernels(self) -> None:
            raise Rehearsed

    platform = current_platform("cuda")
    platform.upload_stream = lambda device: None
    platform.select_kernels(deterministic=config.model.deterministic)
    runner = import_class(platform.runner_class(), "device")(config, platform, Runtime())
    specs = runner.kv_cache_specs()
    plan = plan_kv_cache(specs, memory // 2, config.cache, config.scheduler, max_model_len=config.model.max_model_len)
    runner.allocate(plan)
    return runner


class Rehearsed(Exception):
    """All is named; nothing else of the start is wanted."""


def record(config: Any, memory: int) -> list[dict[str, Any]]:
    """The variants that a start launches."""
    from quire.kernels.triton.runtime import variants

    recorder = variants.recorder(lambda variant: None)

    def rehearse(launch_all: Any, feature: str) -> None:
        # What a feature does with values on the host cannot be imagined; its kernels are launched before that.
        with contextlib.suppress(NotImplementedError, RuntimeError) if feature else contextlib.nullcontext():
            launch_all()

    with recorder.collecting() as found:  # some formats round weights with kernels of their own
        try:
            imagine_runner(config, memory, rehearse)
        except Rehearsed:
            return found
    raise RuntimeError("the runner did not rehearse")


def slowest_first(variants: list[dict[str, Any]], capability: int) -> list[dict[str, Any]]:
    """In the order in which a start with few cores should compile them; without those that cannot be compiled."""
    from quire.kernels.triton.runtime import places
    from quire.kernels.triton.runtime.ahead import CompilingProcess

    with tempfile.TemporaryDirectory() as folder:
        compiling = CompilingProcess(capability, os.cpu_count() or 1, Path(folder))
        compiling.add(variants)
        compiling.finish()
        compiling.wait()
        compiling.close()
    for error in compiling.errors.values():
        print(f"not compiled: {error}", file=sys.stderr)
    good = [variant for variant in variants if places.identity(variant) not in compiling.errors]
    return sorted(good, key=lambda variant: -compiling.seconds.get(places.identity(variant), 0.0))


def as_ordered_in(path: Path, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of the list that is there; what it does not have comes first."""
    from quire.kernels.triton.runtime import places

    order = {places.identity(variant): number for number, variant in enumerate(places.read_list(path))}
    return sorted(variants, key=lambda variant: order.get(places.identity(variant), -1))


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else text


def main() -> None:
    """One list a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--compile", action="store_true", help="compile all, and put the slowest first")
    parser.add_argument("--output", type=Path, help="default: the package's lists")
    parser.add_argument("--gpu", default="NVIDIA H200")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--memory", type=int, default=140, help="GiB of the GPU")
    parser.add_argument("--processors", type=int, default=132)
    parser.add_argument("--shared", type=int, default=227, help="KiB of shared memory that a block may have")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine argument")
    args = parser.parse_args()
    imagine_gpu(args.gpu, divmod(args.capability, 10), args.memory * GIB, args.processors, args.shared << 10)

    from quire.engine.arg_utils import EngineArgs
    from quire.kernels.triton.runtime import places
    from quire.kernels.triton.runtime.preparation import list_name

    settings = {name: _number(text) for name, text in (entry.split("=", 1) for entry in args.set)}
    for model in args.models:
        given = EngineArgs(model=model, device="cuda", load_format="dummy", skip_tokenizer_init=True)
        config = dataclasses.replace(given, **settings).create_engine_config()
        variants = record(config, args.memory * GIB)
        name = list_name(config, args.capability)
        path = (args.output or places.SHIPPED_LISTS) / f"{name}.json"
        variants = slowest_first(variants, args.capability) if args.compile else as_ordered_in(path, variants)
        places.write_list(path, variants)
        print(f"{model}: {len(variants)} kernels, {name}")


if __name__ == "__main__":
    main()
