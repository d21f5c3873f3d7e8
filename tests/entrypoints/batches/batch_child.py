"""A process that runs the batches of a folder with a stand-in for the model: `python batch_child.py FOLDER [DELAY_S]`.

It prints `running` when it has begun, and ends when no batch is left. A test kills it.
"""

import asyncio
import json
import random
import resource
import sys

from quire.entrypoints.batches.protocol import BatchError, BatchResult
from quire.entrypoints.batches.runner import BatchRunner, Window
from quire.entrypoints.batches.store import BatchStore
from quire.entrypoints.batches.tables import BatchFolder


async def main(path: str, delay_s: float) -> None:
    folder = BatchFolder(path, "batch_store")
    assert folder.lock()
    draw = random.Random(1)

    async def answer(line: bytes) -> BatchResult:
        if delay_s:
            await asyncio.sleep(draw.random() * delay_s)
        request = json.loads(line)
        name = request["custom_id"]
        error = BatchError("odd", "x") if request["body"].get("odd") else None
        return BatchResult(id=f"answer-{name}", custom_id=name, error=error)

    print("running", flush=True)
    await BatchRunner(BatchStore(folder), answer, Window(32), (), 1 << 20).run(until_done=True)
    folder.close()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MiB at most", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
