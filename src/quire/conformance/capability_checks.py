"""What a platform says of itself: the record of capabilities is whole, and what it claims is so."""

import dataclasses
from typing import Any

import torch

from quire.config.checks import FLAG, Check, one_of, whole
from quire.conformance.contract import NotClaimed, Subject, check, expect
from quire.platforms.interface import Platform
from quire.plugins.registry import import_class
from quire.worker.components import resolve_components
from quire.worker.model_runner import ModelRunner


def _is_type(name: Any) -> bool:
    return isinstance(getattr(torch, str(name), None), torch.dtype)


_PAIR = Check("two numbers: offline, server", lambda value: len(value or ()) == 2 and min(value) >= 1)
VALUES = {
    "dtypes": Check("names of types", lambda value: bool(value) and all(map(_is_type, value))),
    "activation_dtype": Check("`model` or the name of a type", lambda value: value == "model" or _is_type(value)),
    "graphs": one_of("none", "decode", "whole_step"),
    "slot_dtype": one_of("int64", "int32"),
    **dict.fromkeys(("page_alignment", "min_prefill_tokens"), whole(1)),
    **dict.fromkeys(("max_num_batched_tokens", "max_num_seqs"), _PAIR),
}
"""What a capability's value may be; others are True or False."""
_SIZE = 64


@check("capabilities/record", "every capability has a value of its kind and a reason")
def check_record(subject: Subject) -> str:
    """Types, ranges and reasons."""
    wrong: list[str] = []
    capabilities = subject.capabilities
    fields = dataclasses.fields(capabilities)
    for field in fields:
        claim = getattr(capabilities, field.name)
        if not getattr(claim, "why", ""):
            wrong.append(f"{field.name} has no reason")
        value, kind = getattr(claim, "value", None), VALUES.get(field.name, FLAG)
        if not kind.passes(value):
            wrong.append(f"{field.name}={value!r}: {kind.allowed}")
    expect(not wrong, "the record is not whole", "an `Explained` in each field, with a reason", "; ".join(wrong))
    return f"{len(fields)} fields"


@check(
    "capabilities/classes",
    "the classes that the platform names can be imported, and the first backend is the platform's own",
)
def check_classes(subject: Subject) -> str:
    """Runner, worker, attention backends."""
    from quire.attention.selector import load_backend

    platform: Platform = subject.platform
    paths = [platform.runner_class(), platform.worker_class()]
    resolve_components(platform.runner_components(subject.config))
    for path in paths:
        import_class(path, "platform")
    runner = import_class(platform.runner_class(), "platform")
    expect(
        not issubclass(runner, ModelRunner) or subject.runtime.is_host,
        "the runner does not fit the device: it computes in the host's own memory",
        "quire.worker.device_runner:DeviceRunner, for a device with memory of its own",
        platform.runner_class(),
    )
    backends = platform.attention_backends()
    for path in backends:
        load_backend(path)
    expect(backends, "there is no attention backend", "at least the reference backend's path", "an empty list")
    return f"{platform.name}: {', '.join([*paths, *backends])}"


@check(
    "capabilities/config",
    "the platform accepts a plain configuration with each type that it claims",
)
def check_config(subject: Subject) -> str:
    """`check_config`, and whatever else is asked on its way."""
    names = subject.capabilities.dtypes.value
    configs = [subject.config_with(dtype=name) for name in names]
    return f"{', '.join(names)}; device={configs[0].device.device}"


@check("capabilities/dtypes", "the device multiplies matrices of every type that it claims, and sums in float32")
def check_dtypes(subject: Subject) -> str:
    """A product beside float64's."""
    generator = torch.Generator().manual_seed(subject.seed)
    told: list[str] = []
    for name in subject.capabilities.dtypes.value:
        dtype = getattr(torch, name)
        left, right = (torch.randn(_SIZE, _SIZE, generator=generator).to(dtype) for _ in range(2))
        got = (left.to(subject.device) @ right.to(subject.device)).cpu().double()
        expected = left.double() @ right.double()
        error, limit = float((got - expected).norm() / expected.norm()), 4 * torch.finfo(dtype).eps
        expect(
            error <= limit, f"products in {name} are off", f"a relative error of at most {limit:.1e}", f"{error:.1e}"
        )
        told.append(f"{name} {error:.0e}")
    return ", ".join(told)


@check(
    "capabilities/fp8", "float8 values come to the device and back, and one of the platform's kernels multiplies them"
)
def check_fp8(subject: Subject) -> str:
    """Bits, and the registry."""
    subject.claims("fp8")
    from quire.kernels import ops

    every = torch.arange(256, dtype=torch.uint8)
    there = every.view(torch.float8_e4m3fn).to(subject.device)
    got, expected = there.float().cpu(), every.view(torch.float8_e4m3fn).float()
    expect(
        torch.equal(got.nan_to_num(), expected.nan_to_num()),
        "float8 values change on the device",
        "the same 256 values",
        f"{int((got != expected).sum())} others",
    )
    with subject.kernels():
        if not ops.is_native("fp8_linear"):
            raise NotClaimed("fp8 is claimed, but products in float8 are plain PyTorch's")
    return "256 values; fp8_linear has a kernel of the platform's own"
