"""The batches of one server, as its routes see them."""

from collections.abc import Container, Set

from quire.entrypoints.batches.runner import BatchRunner
from quire.entrypoints.batches.store import BatchStore
from quire.entrypoints.batches.tables import BatchFolder


class Batches:
    """Files and batches of one server.

    Args:
        path: the folder that keeps them.
        endpoints: paths that batches may have.
        closed: paths that lines may not have.
        api_key: a key that opens the server's routes, if keys are needed.

    Attributes:
        runner: what runs the batches, in the process that does.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, path: str, endpoints: Set[str], closed: Container[str], api_key: str | None) -> None:
        self.folder = BatchFolder(path, "batch_store")
        self.closed = closed
        self.api_key = api_key
        self.runner: BatchRunner | None = None
        self.endpoints = endpoints
        self.store = BatchStore(self.folder)

    def wake(self) -> None:
        """Something has changed in the store."""
        if self.runner is not None:
            self.runner.wake()

    def close(self) -> None:
        self.folder.close()
