"""Questions about the machine, and whether the patches are needed still."""

from importlib.metadata import entry_points


def is_here() -> bool:
    """Whether this machine has the made-up device: every machine has it."""
    return True


def has_own_platform() -> bool:
    """Whether the device has a platform plugin by now."""
    return any(point.name == "example" for point in entry_points(group="quire.platform_plugins"))


def worker_counts_itself() -> bool:
    """Whether Quire's worker has the method by now."""
    from quire.worker.worker import Worker

    return hasattr(Worker, "num_steps")
