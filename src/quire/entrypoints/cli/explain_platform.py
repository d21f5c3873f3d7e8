"""`quire explain --platform NAME`: what would be chosen on a device, also on a machine that does not have it. Needs no model."""

import dataclasses
import importlib.util
from typing import Any

from quire.entrypoints.cli.terminal import columns
from quire.errors import ConfigError
from quire.extras import pip_install
from quire.platforms import BUILT_IN, UNTESTED, current_platform
from quire.platforms.interface import Capabilities, Platform


def explain_platform(name: str) -> dict[str, Any]:
    """Capabilities, kernels and attention backends of a platform, and what is NVIDIA's alone, as plain values.

    Raises:
        ConfigError: there is no such platform, or its kernels cannot be read.
    """
    from quire.kernels import ops

    platform = current_platform(name)
    if name in ("cuda", "rocm", "xpu") and importlib.util.find_spec("triton") is None:
        raise ConfigError.of("platform", f"the kernels of {name} need Triton to be read: {pip_install('triton')}")
    platform.select_kernels()
    return {
        "platform": {"name": platform.name, "device": platform.device_name(), "here": _usable(platform)},
        "capabilities": explain_capabilities(platform.capabilities()),
        "kernels": ops.explain(),
        "attention_backends": platform.attention_backends(),
        "only on NVIDIA": _nvidia_only(platform),
    }


def explain_capabilities(capabilities: Capabilities) -> dict[str, Any]:
    """Each value with its reason."""
    return {
        field.name: {"value": (because := getattr(capabilities, field.name)).value, "why": because.why}
        for field in dataclasses.fields(capabilities)
    }


def _usable(platform: Platform) -> str:
    """Whether this machine has it, and whether the platform was ever run."""
    from quire.platforms.untested import UntestedPlatform

    if isinstance(platform, UntestedPlatform):
        why = platform.why_unusable()
        state = "usable" if why is None else f"not usable: {why}; the rest is told for an assumed device"
        return f"{state}; this platform has never run on its hardware"
    if platform.name == "cuda" and platform.name in BUILT_IN:
        from quire.platforms.cuda import why_unusable

        why = why_unusable()
        return "usable" if why is None else f"not usable: {why}"
    return "usable" if platform.name not in UNTESTED else "not known"


def _nvidia_only(platform: Platform) -> list[dict[str, str]]:
    if platform.name not in ("cuda", "rocm", "xpu"):
        return []
    from quire.kernels.triton.nvidia_only import explain

    return explain()


def platform_text(report: dict[str, Any]) -> str:
    """The report for a reader."""
    lines = section(f"platform {report['platform']['name']}", report["platform"])
    lines += section("capabilities", {name: with_why(each) for name, each in report["capabilities"].items()})
    lines += section("kernels", {op: kernel_line(each) for op, each in report["kernels"].items()})
    lines += ["", "attention backends, in this order", *(f"  {path}" for path in report["attention_backends"])]
    if report["only on NVIDIA"]:
        parts = {
            each["what"]: f"{each['here']}; behind: {each['behind']}; else {each['instead']}"
            for each in report["only on NVIDIA"]
        }
        lines += section("only on NVIDIA's GPUs", parts)
    return "\n".join(lines).lstrip("\n")


def section(title: str, facts: dict[str, Any]) -> list[str]:
    """Lines of a part of a report."""
    return ["", title, *columns(facts)]


def with_why(entry: dict[str, Any]) -> str:
    """A value, and why it is so."""
    return f"{entry['value']!r}" + (f"  ({entry['why']})" if entry.get("why") else "")


def kernel_line(entry: dict[str, Any]) -> str:
    """Which kernel was chosen for an operation, and why others were not; those that others only outrank are left out."""
    line = f"{entry['chosen']}: {entry['function']}"
    passed = [each for each in entry["passed_over"] if "priority" not in each["why"]]
    told = "; ".join(f"{each['platform']}: {each['why']}" for each in passed)
    return f"{line}  (not {told})" if passed else line
