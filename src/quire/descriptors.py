"""File descriptors of this process: waiting for one, memory that has one, and how many may be open."""

import os
import select
import tempfile


def wait_readable(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor can be read, or its other end is closed, at most so long; whether it can. Unlike `select`, which
    knows descriptors below 1,024 only, it takes any."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def memory_file(size: int, name: str) -> int:
    """A descriptor of so many bytes of memory, all zero, in a file that no folder lists; `name` is for those who look."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def raise_limit(wanted: int) -> int | None:
    """Raise the soft limit of open files to `wanted`, or as far as the system lets; the limit then, None where there is none."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return None if soft == resource.RLIM_INFINITY else soft
