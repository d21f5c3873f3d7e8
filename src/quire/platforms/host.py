"""What this process may use of its host: cores and memory, as the kernel and its control groups allow.

Knows /proc and /sys. Knows nothing of tensors, models or settings.
"""

import os
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED_FROM = 1 << 60
"""A version 1 control group without a limit reports a number near 2^63."""


def usable_cpus(cgroup: Path = CGROUP) -> int:
    """Cores that this process may run on: its affinity mask, cut by the control group's quota (rounded up)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return max(1, count if quota is None else min(count, -int(-quota // 1)))


def _cpu_quota(cgroup: Path) -> float | None:
    words = _read(cgroup / "cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota = _read_int(cgroup / "cpu" / "cpu.cfs_quota_us")
    period = _read_int(cgroup / "cpu" / "cpu.cfs_period_us")
    if quota is not None and quota > 0 and period:
        return quota / period
    return None


def usable_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> tuple[int, int]:
    """(free, total) bytes that this process may still allocate and may have in all, page cache counted as free."""
    free, total = _host_memory(proc)
    for limit_file, used_file, stat_file in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        limit = _read_int(cgroup / limit_file)
        used = _read_int(cgroup / used_file)
        if limit is None or used is None or limit >= _UNLIMITED_FROM:
            continue
        total = min(total, limit)
        free = min(free, max(0, limit - used + _reclaimable(cgroup / stat_file)))
    return free, total


def _host_memory(proc: Path) -> tuple[int, int]:
    values: dict[str, int] = {}
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    if "MemTotal" in values:
        return values.get("MemAvailable", values.get("MemFree", 0)), values["MemTotal"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # No /proc (macOS): half of the memory is a guess that leaves the rest of the machine usable.
    return total // 2, total


def _reclaimable(stat_file: Path) -> int:
    """Bytes of page cache that the kernel gives back under pressure."""
    for line in _read(stat_file).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in ("inactive_file", "total_inactive_file"):
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    try:
        return int(text)
    except ValueError:
        return None
