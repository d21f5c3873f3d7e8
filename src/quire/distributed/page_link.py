"""Two engines that hand pages to one another, through a process group of their own: the device's library, or gloo.

Knows two members and bytes in rows; knows nothing of what they are.
"""

import contextlib
import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist

from quire.distributed.groups import has_library, open_group, outliving_members

_CHUNK = 64 << 20
"""Bytes of a message, if a row has no more."""


def open_meeting(address: str) -> tuple[Any, tuple[str, int]]:
    """Where members of links find one another, as long as somebody keeps the first; its address and port. Raises OSError."""
    stores: Any = dist
    with socket.create_server((address, 0)) as server:
        place = (address, server.getsockname()[1])
        return stores.TCPStore(*place, None, True, wait_for_workers=False, master_listen_fd=server.detach()), place


class PageLink:
    """One member's end. One call at a time.

    Args:
        place: address and port of a meeting, where the members find one another under the link's name.
        rank: 0 or 1.
        device: where rows lie.
        wait_s: how long one waits for the other.

    Raises:
        RuntimeError: the other one did not come in time.
    """

    def __init__(self, place: tuple[str, int], name: str, rank: int, device: torch.device, wait_s: float) -> None:
        stores: Any = dist
        self._other, wait = 1 - rank, datetime.timedelta(seconds=wait_s)
        store = stores.TCPStore(
            *place, None, False, wait, wait_for_workers=False
        )  # its own: a call blocks all that share one
        with outliving_members() if has_library(device) else contextlib.nullcontext():
            self._group, _ = open_group(stores.PrefixStore(name, store), rank, 2, device, wait)

    def send(self, rows: list[torch.Tensor]) -> None:
        """Submit rows of equal length to the other member, which receives as many. Raises RuntimeError: it is lost."""
        count = _rows_at_once(rows[0])
        for start in range(0, len(rows), count):
            self._group.send([torch.stack(rows[start : start + count])], self._other, 0).wait()

    def receive(self, into: torch.Tensor) -> None:
        """Submit the receipt of rows. Raises RuntimeError: the other member is lost."""
        for some in into.split(_rows_at_once(into[0])):
            self._group.recv([some], self._other, 0).wait()

    def abort(self) -> None:
        """Stop what is on its way; the link is of no use afterwards."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()


def _rows_at_once(row: torch.Tensor) -> int:
    return max(1, _CHUNK // row.nbytes)
