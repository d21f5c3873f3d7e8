"""Prints the keys of all listed kernels, asked for in an order drawn from a seed: `python key_order.py SEED`."""

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
keys = {}
for name in names[: len(names) * 2 // 3]:  # each process looks at other kernels
    try:
        keys[name] = variants.source_of(kernels[name]).hash()
    except variants.StaleVariant:
        continue
print(json.dumps(keys))
