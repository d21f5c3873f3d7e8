"""A start in a process of its own, with a GPU that exists only in Triton's eyes: kernels are compiled for it and not launched.

Usage: python preparation_start.py MODEL_FOLDER ACTIONS...; prints one JSON object. Not a test: run by test_preparation.py.
"""

import importlib
import json
import os
import sys
import time

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from quire.engine.arg_utils import EngineArgs
from quire.kernels.triton.runtime import ahead, door, places
from quire.kernels.triton.runtime.preparation import KernelPreparation


class Device:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launch_all(launch) -> None:
    """A kernel in four forms: lengths that are multiples of 16, that are not, and one; with a weight and without."""
    x = torch.zeros(64, 64)
    for rows, weight in ((16, x), (17, x), (1, x), (16, None)):
        launch(x, weight, x, rows, 64, 1e-6, BLOCK=64, KIND=tl.float32, num_warps=1, launch_pdl=True)


def main() -> None:
    """Do what the arguments say, in the order in which a worker does it."""
    folder, *actions = sys.argv[1:]
    config = EngineArgs(model=folder, device="cpu").create_engine_config()
    door.install_driver = lambda: triton.runtime.driver.set_active(Device())
    places.PACKAGES = (*places.PACKAGES, "tests.")
    preparation = KernelPreparation(config, 90, 2)
    preparation.begin()
    report = {"list": preparation.name, "compiles": preparation._compiling is not None}
    preparation.install()
    if "die" in actions:
        preparation._compiling._process.kill()
    module = importlib.import_module(f"tests.kernels.triton.{'needy' if 'needy' in actions else 'toy'}_kernel")
    toy_kernel = module.toy_kernel

    if "rehearse" in actions:
        preparation.rehearse(lambda: launch_all(toy_kernel[(1,)]))
    if "stumble" in actions:

        def stumble() -> None:
            launch_all(toy_kernel[(1,)])
            raise AttributeError("what a launch returns")

        preparation.rehearse(stumble)
    if "wait" in actions and preparation._compiling is not None:
        report["finished"] = preparation._compiling.wait(100)
    report["ahead"] = len(list(places.writable_folder().rglob("*.cubin")))
    begin = time.perf_counter()
    launch_all(lambda *args, **options: toy_kernel.warmup(*args, grid=(1,), **options))
    report["seconds"] = time.perf_counter() - begin
    preparation.save()
    if preparation._compiling is not None:
        preparation._compiling.wait(ahead.PATIENCE_S)
    preparation.close()
    report["compiled"] = len(list(places.writable_folder().rglob("*.cubin")))
    report["listed"] = len(places.find_list(preparation.name))
    report["stamps"] = len(list(places.writable_folder().glob("done-*")))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
