"""Prints the keys of two thirds of the listed kernels, drawn by a seed and asked for in its order: `python key_order.py SEED`.
A list that names a kernel as it was once is an error: the parameters it lacks belong into the list."""

import json
import random
import sys

from quire.kernels.triton.runtime import without_torch

without_torch.install()  # as in the process that compiles

from quire.kernels.triton.runtime import cache, places, variants  # noqa: E402

draw = random.Random(int(sys.argv[1]))
listed = places.merge(*(places.read_list(path) for path in sorted(places.SHIPPED_LISTS.glob("*.json"))))
kernels = {variant["kernel"]: variant for variant in listed}
names = sorted(kernels)
draw.shuffle(names)
cache.install()
sources = {name: variants.source_of(kernels[name]) for name in names}
print(json.dumps({name: sources[name].hash() for name in names[: len(names) * 2 // 3]}))
