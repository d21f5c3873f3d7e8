"""`quire doctor [URL]`: what is wrong with this machine or with a running server, and which setting changes it.

The machine's checks read files of the kernel; a server looks at its own last hour. Changes nothing.
"""

import argparse
import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire import envs
from quire.engine.arg_parser import only
from quire.entrypoints import exit_codes
from quire.entrypoints.cli.running import find_servers
from quire.entrypoints.cli.terminal import show
from quire.entrypoints.cli.top import ServerWatch
from quire.entrypoints.findings import FINE, LOOK, WRONG, Finding, server_findings
from quire.platforms.host import usable_cpus, usable_memory

_GB = 1e9
_FEW_FILES = 4096
_SMALL_SHARED = 1 * _GB
_LITTLE_DISK = 5 * _GB
_HERE = ("127.0.0.1", "localhost", "::1")


add_arguments = only(
    ("url", None, "a server; none means those of `quire ps`, if any run", {"nargs": "?", "metavar": "URL"}),
    ("--url", None, "the same", {"dest": "named_url", "metavar": "URL"}),
    ("--api-key", None, "the server's key (or QUIRE_API_KEY)", {"metavar": "KEY"}),
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> int:
    findings = {"this machine": machine_findings()}
    servers = [each.url for each in find_servers() if each.url.startswith("http")]
    for url in [args.url or args.named_url] if args.url or args.named_url else servers:
        watch = ServerWatch(url, args.api_key or envs.QUIRE_API_KEY)
        sample = watch.sample()
        place, found = _of_server(sample.metrics, watch.ask("/console/findings"))
        found.append(_keys(url, servers))
        findings[f"{sample.model or 'the server'} at {url}{place}"] = found
    plain = {place: [each._asdict() for each in found] for place, found in findings.items()}
    show(plain, args.json, lambda: as_text(findings))
    is_wrong = any(each.state == WRONG for found in findings.values() for each in found)
    return exit_codes.FAILED if is_wrong else exit_codes.OK


def _of_server(metrics: Mapping[str, float], told: Any) -> tuple[str, list[Finding]]:
    """What a server finds in its last hour; one that does not look is judged by its figures since its start."""
    if not isinstance(told, dict):
        return ", since its start", server_findings(metrics)
    found = [Finding(**each) for each in told["findings"]]
    return f", in the last {max(1, round(told['seconds'] / 60))} min", found


def _keys(url: str, servers: Sequence[str]) -> Finding:
    """Whether anybody who reaches a server may use it. `servers`: the addresses at which those of this machine listen."""
    place = urlsplit(url if "://" in url else f"http://{url}")
    if place.hostname in _HERE:
        place = next((each for each in map(urlsplit, servers) if each.port == place.port), place)
    if ServerWatch(url, None).ask("/v1/models") is None:
        return Finding("API key", FINE, "needed")
    if place.hostname in _HERE:
        return Finding("API key", FINE, "not needed, and only this machine reaches the server")
    to_do = "--api-key KEY (or QUIRE_API_KEY), or --host 127.0.0.1 behind a proxy that asks for one"
    return Finding("API key", LOOK, f"not needed: whoever reaches {place.netloc} may use the server", to_do)


def as_text(findings: Mapping[str, list[Finding]]) -> str:
    """What is not fine first, each with what to do."""
    lines: list[str] = []
    for place, found in findings.items():
        width = max(len(each.check) for each in found)
        lines += ["", place]
        for each in sorted(found, key=lambda each: (WRONG, LOOK, FINE).index(each.state)):
            lines.append(f"  {each.state:<5}  {each.check:<{width}}  {each.seen}")
            lines += [f"  {'':<5}  {'':<{width}}  → {each.to_do}"] if each.to_do else []
    return "\n".join(lines).lstrip("\n")


# --- the machine ---


def machine_findings(
    proc: Path = Path("/proc"), sys: Path = Path("/sys"), shared: Path = Path("/dev/shm")
) -> list[Finding]:
    """Checks of this machine; the folders are the kernel's."""
    return [*_device(), _memory(), _cores(), _files(), _shared_memory(shared), _clock(sys), _swapping(proc), _disk()]


def _device() -> list[Finding]:
    from quire.errors import QuireError
    from quire.platforms import current_platform

    try:
        platform = current_platform()
    except QuireError as error:
        return [Finding("device", WRONG, str(error), "`quire explain --platform NAME` tells what a platform needs")]
    found = [Finding("device", FINE, f"{platform.device_name()} ({platform.name})")]
    if platform.device_count() is not None:  # it has devices of its own, beside the CPU
        return found
    from quire.kernels.cpu import library_status

    available, isa, why = library_status()
    to_do = "plain PyTorch serves, several times slower: `python -m quire.kernels.cpu.build`"
    return [*found, Finding.of("CPU kernels", available, isa if available else why, to_do, WRONG)]


def _memory() -> Finding:
    free, total = usable_memory()
    seen = f"{free / _GB:.1f} of {total / _GB:.1f} GB are free"
    return Finding.of("memory", free >= total / 10, seen, "end other programs, or set --kv-cache-memory-bytes")


def _cores() -> Finding:
    usable = usable_cpus()
    to_do = "give it two: the server and the engine core are two processes"
    return Finding.of("cores", usable >= 2, f"{usable} of {os.cpu_count() or 1} usable", to_do)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    to_do = f"each connection is one: `ulimit -n {min(hard, 65536)}`"
    return Finding.of("open files", soft >= _FEW_FILES, f"at most {soft}", to_do)


def _shared_memory(folder: Path) -> Finding:
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        to_do = "several ranks or frontends need it: mount a tmpfs there"
        return Finding("shared memory", LOOK, f"there is no {folder}", to_do)
    to_do = "several ranks or frontends need more: docker run --shm-size 8g, or an emptyDir with medium Memory"
    is_fine = size >= _SMALL_SHARED
    seen = f"{size / _GB:.{1 if is_fine else 2}f} GB in {folder}"
    return Finding.of("shared memory", is_fine, seen, to_do)


def _clock(sys: Path) -> Finding:
    source = _read(sys / "devices/system/clocksource/clocksource0/current_clocksource")
    to_do = "reading it is slow; boot with clocksource=tsc if the machine has a stable one"
    return Finding.of("clock", source not in ("hpet", "acpi_pm"), source or "not told", to_do)


def _swapping(proc: Path) -> Finding:
    values = dict(line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line)
    total, free = (int(values.get(name, "0").split()[0]) * 1024 for name in ("SwapTotal", "SwapFree"))
    seen = f"{(total - free) / _GB:.1f} GB in use"
    return Finding.of("swap", total - free <= _GB, seen, "pages of a model in swap are slow: free memory")


def _disk() -> Finding:
    from quire.config.hub.download import free_bytes
    from quire.config.hub.find import open_hub
    from quire.config.hub.listing import HubSettings

    cache = Path(open_hub(HubSettings()).cache)
    free = free_bytes(cache)
    seen = f"{free / _GB:.1f} GB free for models in {cache}"
    to_do = "`quire rm MODEL` deletes one; HF_HOME or --download-dir name another folder"
    return Finding.of("disk", free >= _LITTLE_DISK, seen, to_do)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
