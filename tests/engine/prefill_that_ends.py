"""A prefill engine in a process of its own that hands over the first page of a prompt only, two times: then it stalls, and then
is killed.

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
_transfers: list[PageLink] = []


def _send_one(self: PageLink, rows: list[object]) -> None:
    _transfers.append(self)
    _send(self, rows[:1])  # type: ignore[arg-type]
    if len(_transfers) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


if __name__ == "__main__":
    PageLink.send = _send_one  # type: ignore[method-assign]
    with an_engine(Path(sys.argv[1]), "kv_producer", None, "nccl") as llm:
        print("PARAMS", json.dumps(ask(llm, DECODE_THERE, 1).kv_transfer_params), flush=True)
        sys.stdin.read()
