"""Prints the keys of two thirds of the listed kernels, drawn by a seed and asked for in its order: `python key_order.py SEED`.
A list that names a kernel as it was once is an error: the parameters it lacks belong into the list."""

import importlib
import json
import pkgutil
import random
import sys

from quire.kernels.triton.runtime import without_torch

without_torch.install()  # as in the process that compiles

from triton.runtime import JITFunction  # noqa: E402

from quire.kernels import triton as triton_kernels  # noqa: E402
from quire.kernels.triton.runtime import cache, places, variants  # noqa: E402

draw = random.Random(int(sys.argv[1]))
listed = places.merge(*(places.read_list(path) for path in sorted(places.SHIPPED_LISTS.glob("*.json"))))
kernels = {variant["kernel"]: variant for variant in listed}
names = sorted(kernels)
draw.shuffle(names)
cache.install()
sources = {name: variants.source_of(kernels[name]) for name in names}
for module in pkgutil.walk_packages(triton_kernels.__path__, triton_kernels.__name__ + "."):
    for kernel in vars(importlib.import_module(module.name)).values():
        if isinstance(
            kernel, JITFunction
        ):  # Triton runs none whose globals differ from what they were, and NaN does always
            assert kernel.cache_key and all(value == value for value, _ in kernel.used_global_vals.values()), kernel
print(json.dumps({name: sources[name].hash() for name in names[: len(names) * 2 // 3]}))
