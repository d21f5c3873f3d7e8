"""A prefill engine in a process of its own that hands over the first page of a prompt only, and then stalls. After a line on
its standard input, which it repeats, it is killed instead.

    python -m tests.engine.prefill_that_ends MODEL      prints its answer's kv_transfer_params
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from tests.engine.test_disaggregated_prefill import DECODE_THERE, an_engine, ask

from quire.distributed.page_link import PageLink

_send = PageLink.send
_is_to_be_killed = threading.Event()


def _send_one(self: PageLink, rows: list[object]) -> None:
    _send(self, rows[:1])  # type: ignore[arg-type]
    if _is_to_be_killed.is_set():
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


if __name__ == "__main__":
    PageLink.send = _send_one  # type: ignore[method-assign]
    with an_engine(Path(sys.argv[1]), "kv_producer", None, "nccl") as llm:
        print("PARAMS", json.dumps(ask(llm, DECODE_THERE, 1).kv_transfer_params), flush=True)
        for line in sys.stdin:
            _is_to_be_killed.set()
            print(line, flush=True, end="")
