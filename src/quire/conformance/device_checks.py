"""The device runtime: memory figures, events, copies beside steps, recorded and captured work.

What a platform does not claim (`async_output`, `graphs`) is not asked for.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire.conformance.contract import Failed, NotClaimed, Subject, check, expect
from quire.platforms.interface import DeviceEvent

ALLOCATION = 256 << 20
"""Bytes: more than an allocator keeps for small tensors."""
SLACK = 96 << 20
"""Bytes by which figures of memory may be off: others share the device."""
_LAUNCHES = 20
_ATTEMPTS, _LAG_S = 10, 0.3


def expect_equal(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises Failed: a value differs."""
    got, expected = got.cpu(), expected.cpu()
    if not torch.equal(got, expected):
        wrong = int((got != expected).sum()) if got.shape == expected.shape else "all"
        raise Failed(f"{what}: {wrong} of {expected.numel()} values differ", expected.flatten()[:4], got.flatten()[:4])


@check("device/device", "tensors are made on the runtime's device, computed with, and come back whole", is_alone=True)
def check_device(subject: Subject) -> str:
    """A round trip, and a sum."""
    device = subject.device
    host = torch.arange(10_000, dtype=torch.float32)
    there = host.to(device)
    expect(there.device.type == device.type, "a tensor is elsewhere than it was sent", device, there.device)
    doubled = there + there
    subject.runtime.synchronize()
    expect_equal("a round trip", doubled, host * 2)
    return f"{device}"


@check("device/memory", "free memory falls by what is allocated, and comes back with release_unused", is_alone=True)
def check_memory(subject: Subject) -> str:
    """`memory_info` before, while and after there is a large tensor: again where others who share the memory disturb it."""
    free, total = subject.runtime.memory_info()
    expect(0 < free <= total, "(free, total) makes no sense", "0 < free <= total", (free, total))
    if (cap := subject.runtime.kv_cache_cap()) is not None:
        return f"{free >> 20} of {total >> 20} MiB are free; others' use moves that too ({cap.why})"
    seen: list[tuple[int, int]] = []
    while not all(any(abs(pair[side] - ALLOCATION) <= SLACK for pair in seen) for side in (0, 1)):
        if len(seen) == _ATTEMPTS:
            expected = f"{ALLOCATION} bytes less, then as many more, within {SLACK}, once in {_ATTEMPTS} times"
            raise Failed("free memory does not follow an allocation", expected, f"(less, more): {seen}")
        seen.append(_watch_allocation(subject))
    return f"{free >> 20} of {total >> 20} MiB are free; {ALLOCATION >> 20} MiB were taken and came back"


def _watch_allocation(subject: Subject) -> tuple[int, int]:
    """Free bytes that a large tensor takes, and that come back with its end."""
    runtime = subject.runtime
    runtime.release_unused()
    before, _ = runtime.memory_info()
    held = torch.full((ALLOCATION,), 7, dtype=torch.uint8, device=subject.device)
    runtime.synchronize()
    during = _await_free(subject, before - ALLOCATION)
    del held
    runtime.release_unused()
    return before - during, _await_free(subject, during + ALLOCATION) - during


def _await_free(subject: Subject, wanted: int) -> int:
    """Free bytes, as soon as they are near what is wanted; a host's figures lag behind."""
    last = time.monotonic() + _LAG_S
    while abs((free := subject.runtime.memory_info()[0]) - wanted) > SLACK and time.monotonic() < last:
        time.sleep(0.02)
    return free


@check("device/peak", "peak memory counts what was allocated and freed again", is_alone=True)
def check_peak(subject: Subject) -> str:
    """`peak_memory`."""
    runtime = subject.runtime
    held = torch.full((ALLOCATION,), 7, dtype=torch.uint8, device=subject.device)
    runtime.synchronize()
    del held
    peak = runtime.peak_memory()
    expect(peak >= ALLOCATION, "the peak is below an allocation", f"at least {ALLOCATION} bytes", peak)
    return f"{peak >> 20} MiB"


@check("device/total", "the device's memory is told without opening it, as the runtime tells it", is_alone=True)
def check_total(subject: Subject) -> str:
    """`Platform.memory_bytes` beside `memory_info`."""
    told, (_, total) = subject.platform.memory_bytes(), subject.runtime.memory_info()
    if told is None:
        raise NotClaimed("memory_bytes() is None: a model that cannot fit is refused later")
    expect(abs(told - total) <= 0.1 * total, "two figures of one memory", f"{total} bytes, as memory_info() says", told)
    return f"{told >> 20} MiB"


@check("device/bandwidth", "the memory's speed is measured, where the device has memory of its own", is_alone=True)
def check_bandwidth(subject: Subject) -> str:
    """`bandwidth`."""
    found = subject.runtime.bandwidth()
    if found is None:
        raise NotClaimed("bandwidth() is None: it is not measured")
    expect(1e8 < found < 1e15, "no speed of a memory", "bytes a second", found)
    return f"{found / 1e9:.0f} GB/s"


@check("device/pinned", "a pinned copy has the same values, and copies from it can go beside the host's work")
def check_pinned(subject: Subject) -> str:
    """`pinned`."""
    host = torch.arange(1 << 16, dtype=torch.int32)
    pinned = subject.runtime.pinned(host)
    expect_equal("a pinned copy", pinned, host)
    there = torch.zeros_like(host, device=subject.device)
    there.copy_(pinned, non_blocking=True)
    subject.runtime.synchronize()
    expect_equal("a copy from it", there, host)
    empty = subject.runtime.host_empty((3, 4), torch.float32)
    expect(
        not subject.capabilities.pinning.value or (pinned.is_pinned() and empty.is_pinned()),
        "memory is not pinned, as `pinning` claims",
        "is_pinned()",
        "ordinary memory",
    )
    return "the tensor itself" if pinned is host else "host memory of the device's own"


@check("device/crossing", "values come to the device whole by every way: uploads, mirrored memory, memory for results")
def check_crossing(subject: Subject) -> str:
    """`upload`, `mirrored`, `host_empty`."""
    runtime, columns = subject.runtime, np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2]
    there = runtime.upload(columns)
    expect(there.device.type == subject.device.type, "an upload is elsewhere", subject.device, there.device)
    expected = torch.from_numpy(columns.copy())
    columns[:] = -1  # the upload is a copy
    host, mirror = runtime.mirrored(8, torch.int32)
    for value in (3, 4):
        host.fill_(value)
        mirror.copy_(host, non_blocking=True)
        runtime.synchronize()
        expect_equal("mirrored memory", mirror, torch.full((8,), value, dtype=torch.int32))
    result = runtime.host_empty(there.shape, there.dtype)
    result.copy_(there, non_blocking=True)
    runtime.synchronize()
    expect_equal("an upload", result, expected)
    return "one memory" if mirror is host else "both ways"


def _work(subject: Subject, launches: int = _LAUNCHES) -> Callable[[], None]:
    """Something that takes the device a moment, and leaves a sum that tells whether it is over."""
    x = torch.full((256, 256), 1e-3, device=subject.device)

    def launch() -> None:
        for _ in range(launches):
            torch.mm(x, x)

    return launch


def _claims_events(subject: Subject) -> None:
    """Raises NotClaimed: it computes in the host's own memory, where nothing is waited for."""
    if subject.runtime.is_host:
        subject.claims("async_output")


@check(
    "device/events",
    "an event is reached after all that was submitted before it; times between events grow",
    is_alone=True,
)
def check_events(subject: Subject) -> str:
    """Order and times."""
    _claims_events(subject)
    runtime, launch = subject.runtime, _work(subject)
    launch()
    spans: list[list[float]] = []
    for _ in range(3):
        marks: list[DeviceEvent] = []
        for _ in range(3):
            marks.append(runtime.event())
            marks[-1].record()
            launch()
        end = runtime.event()
        end.record()
        end.wait()
        spans.append([end.milliseconds_since(mark) for mark in marks])
    medians = [statistics.median(column) for column in zip(*spans, strict=True)]
    expect(
        medians[0] >= medians[1] >= medians[2] >= 0,
        "times between events are out of order",
        "later marks are nearer to the end",
        f"{medians} ms",
    )
    return f"{medians[0]:.3f}, {medians[1]:.3f} and {medians[2]:.3f} ms before the end"


@check("device/wait", "waiting for an event makes the host see what was copied before it")
def check_wait(subject: Subject) -> str:
    """The pattern of a step's results: compute, copy without blocking, record, wait, read."""
    _claims_events(subject)
    runtime, launch = subject.runtime, _work(subject)
    out = runtime.pinned(torch.zeros(1000, dtype=torch.int32))
    for number in range(1, 6):
        there = torch.full((1000,), number, dtype=torch.int32, device=subject.device)
        launch()
        there += 1
        out.copy_(there, non_blocking=True)
        event = runtime.event()
        event.record()
        event.wait()
        expect_equal(f"round {number}", out.clone(), torch.full((1000,), number + 1, dtype=torch.int32))
    return "5 rounds"


@check("device/uploads", "copies beside the queue arrive whole, in order with what waits for them")
def check_uploads(subject: Subject) -> str:
    """`UploadStream`: staging, fence, submit, join."""
    uploads = subject.platform.upload_stream(subject.device)
    if uploads is None:
        raise NotClaimed("upload_stream() is None: weights are not copied beside the reading of files")
    num_bytes = 1 << 20
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=subject.device)
    staging = uploads.staging(num_bytes)
    for number in (3, 200):
        copied = target.clone()
        uploads.fence()
        staging.fill_(number)
        event = uploads.submit(target, staging)
        uploads.join(event)
        copied.copy_(target)
        event.wait()
        subject.runtime.synchronize()
        expect_equal("an upload", copied, torch.full((num_bytes,), number, dtype=torch.uint8))
    return f"2 copies of {num_bytes >> 20} MiB"


@check("device/capture", "captured work is not run by the capture, and reads its inputs anew at every replay")
def check_capture(subject: Subject) -> str:
    """`capture` and `replay`."""
    subject.claims("async_output")
    subject.claims("graphs")
    x, out = (torch.zeros(4096, device=subject.device) for _ in range(2))

    def compute() -> None:
        torch.add(x, 1.0, out=out)
        out.mul_(2.0)

    compute()  # whatever is made at a first use is made
    out.fill_(-5.0)
    subject.runtime.synchronize()
    graph = subject.runtime.capture(compute)
    if graph is None:
        raise Failed("nothing was captured", "a RecordedStep, as `graphs` claims", "None")
    results: list[Any] = []
    for value in (3.0, 10.0):
        x.fill_(value)
        graph.replay(1, 1)
        subject.runtime.synchronize()
        results.append(out.cpu().clone())
    for value, got in zip((3.0, 10.0), results, strict=True):
        expect_equal("a replay", got, torch.full((4096,), 2 * (value + 1)))
    return "2 replays"


@check("device/record", "a recorded step of the platform's kernels runs again for fewer rows")
def check_record(subject: Subject) -> str:
    """`record`, of one operation over rows."""
    if subject.capabilities.async_output.value:
        raise NotClaimed("async_output is claimed, so that steps are captured and not recorded: see device/capture")
    subject.claims("graphs")
    from quire.kernels import ops

    x, out = (torch.zeros(8, 64, device=subject.device) for _ in range(2))
    weight = torch.ones(64, device=subject.device)
    with subject.kernels():
        step = subject.runtime.record(lambda: ops.rms_norm(x, weight, 1e-6, out, None), 8, 1)
        if step is None:
            raise Failed("nothing was recorded", "a RecordedStep, as `graphs` claims", "None")
        x.normal_(generator=torch.Generator().manual_seed(subject.seed))
        out.fill_(-5.0)
        step.replay(3, 1)
        subject.runtime.synchronize()
        expected = torch.full_like(out, -5.0)
        ops.rms_norm(x[:3], weight, 1e-6, expected[:3], None)
    expect(
        torch.allclose(out.cpu(), expected.cpu(), atol=1e-5),
        "a replay for 3 rows gives something else",
        expected[:4, :2].tolist(),
        out[:4, :2].tolist(),
    )
    return "8 rows recorded, 3 replayed"


@check("device/threads", "another thread computes on the device beside the worker's")
def check_threads(subject: Subject) -> str:
    """`adopt_thread`, `beside_steps` and `reads`."""
    import concurrent.futures

    def compute() -> torch.Tensor:
        subject.runtime.adopt_thread()
        with subject.runtime.beside_steps():
            made = torch.full((1000,), 20.0, device=subject.device) + 1
            event = subject.runtime.event()
            event.record()
            event.wait()
            return made

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        futures = [threads.submit(compute) for _ in range(3)]
        for future in futures:
            subject.runtime.reads(future.result())
            expect_equal("a thread's sum", future.result().cpu(), torch.full((1000,), 21.0))
    return "3 computations"


@check("device/profiler", "the platform's activities are ones that torch's profiler takes")
def check_profiler(subject: Subject) -> str:
    """`profiler_activities`."""
    activities = subject.runtime.profiler_activities()
    if not activities:
        raise NotClaimed("profiler_activities() is empty: a profile has the host's side alone")
    known = torch.profiler.supported_activities()
    expect(
        set(activities) <= set(known),
        "activities that torch's profiler does not know",
        sorted(map(str, known)),
        sorted(map(str, activities)),
    )
    return ", ".join(map(str, activities))


@check("device/closes", "a runtime may be closed twice", is_alone=True)
def check_closes(subject: Subject) -> str:
    """`close`, of a runtime of its own."""
    runtime = subject.platform.runtime(subject.config)
    runtime.close()
    runtime.close()
    return "closed twice"
