"""The parent's side of a core process: what becomes of it when nobody closes it."""

import subprocess
import sys
from pathlib import Path

DROPPED = """
import gc, os, select
from quire.engine.core_client import WaitingClient
from quire.engine.process_client import ProcessClient
from tests.engine.builders import make_config
executor = "tests.oracles.hash_model:HashExecutor"
handle = WaitingClient(lambda on_message: ProcessClient(make_config(), on_message, executor=executor))
watch = os.pidfd_open(handle.client.pid)
handle.itself = handle
del handle
gc.collect()
assert select.select([watch], [], [], 60)[0], "the child is still there"
"""


def test_a_handle_that_is_dropped_unclosed_ends_its_child_and_does_not_block_the_collector() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", DROPPED], cwd=root, check=True, timeout=120)
