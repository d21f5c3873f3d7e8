"""The made-up device itself: it is no CPU, and what it computes is what the CPU computes."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

pytestmark = pytest.mark.usefixtures("device")
MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": lambda there, here: there + here,
    "add to a host's": lambda there, here: here + there,
    "cat": lambda there, here: torch.cat((there, here)),
    "matmul": lambda there, here: there @ here.T,
    "index": lambda there, here: there[here.long()[0]],
    "assign": lambda there, here: there.__setitem__(here > 0, there[0, 0]),
    "out": lambda there, here: torch.exp(there, out=here),
    "where": lambda there, here: torch.where(there > 0, there, here),
    "embedding": lambda there, here: torch.nn.functional.embedding(here.long(), there),
}


@pytest.fixture
def device(npu: None) -> Iterator[None]:
    from quire_fake_npu.driver import driver

    driver()
    with torch.inference_mode():
        yield


def there(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to("npu")


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_the_host_and_of_the_device_do_not_mix(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"tensors of the CPU and of the NPU|on the same device"):
        MIXED[name](there(3, 3), torch.ones(3, 3))


def test_the_host_cannot_read_a_tensor_of_the_device() -> None:
    with pytest.raises(TypeError, match="npu"):
        there(3).numpy()


COMPUTED: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda x: x.add_(1).mul_(2),
    "a view that is written": lambda x: (x[1:].t().fill_(7), x)[1],
    "a view of a view": lambda x: x.t()[1:3].unsqueeze(0).expand(2, -1, -1)[1],
    "another type over the same bits": lambda x: x.view(torch.int32)[::2],
    "several results": lambda x: torch.topk(x, 2),
    "parts": lambda x: x.split((1, 3), dim=1),
    "a result without a size": lambda x: x.sum(),
    "a mask": lambda x: x[x > 3],
    "an index that is written": lambda x: x.index_put_((torch.tensor([2], device=x.device),), x[0] + 1),
    "an output that grows": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "an output of another form": lambda x: torch.sort(x, out=(x.new_empty(0), x.new_empty(0, dtype=torch.long))),
    "a list": lambda x: torch.cat((x, x.flip(0)), dim=1),
    "numbers": lambda x: torch.tensor([x[1, 1].item(), *x[2].tolist()]),
    "another type": lambda x: x.to(torch.bfloat16) @ x.to(torch.bfloat16).T,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_operations_give_what_the_cpu_gives(name: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        found = COMPUTED[name](torch.arange(12.0).view(3, 4).to(device))
        results = [found] if isinstance(found, torch.Tensor) else list(found)  # type: ignore[call-overload]
        assert name == "numbers" or all(each.device.type == device for each in results)
        return [each.cpu() for each in results]

    for ours, theirs in zip(run("npu"), run("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_a_copy_that_nobody_waits_for_has_not_come() -> None:
    from quire_fake_npu.runtime import NpuEvent

    x, first, second = there(4), torch.zeros(4), torch.zeros(4)
    first.copy_(x, non_blocking=True)
    event = NpuEvent()
    event.record()
    x.fill_(9)
    second.copy_(x, non_blocking=True)
    assert first.tolist() == [0, 0, 0, 0]
    event.wait()
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [0, 0, 0, 0]
    assert x.cpu().tolist() == [9, 9, 9, 9] and second.tolist() == [9, 9, 9, 9]


def test_memory_is_counted_freed_and_limited() -> None:
    from quire_fake_npu.driver import TOTAL_BYTES, driver

    before = driver().npu_memory_in_use()
    held = [torch.empty(1 << 20, dtype=torch.uint8, device="npu"), there(1 << 18) + 1]
    assert driver().npu_memory_in_use() - before == 2 << 20
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(TOTAL_BYTES, dtype=torch.uint8, device="npu")
    held.clear()
    assert driver().npu_memory_in_use() == before


def test_a_storage_that_is_emptied_gives_its_memory_back_and_keeps_its_tensors() -> None:
    from quire_fake_npu.driver import driver

    x = there(1000)
    row, before = x[10:20], driver().npu_memory_in_use()
    copy = x.cpu()
    x.untyped_storage().resize_(0)
    assert before - driver().npu_memory_in_use() == 4000
    x.untyped_storage().resize_(4000)
    x.copy_(copy)
    assert row.cpu().tolist() == list(range(10, 20))


def test_devices_have_numbers() -> None:
    tensors = [torch.zeros(2, device=f"npu:{index}") for index in range(2)]
    assert [each.device.index for each in tensors] == [0, 1]
    assert [(each + 1).device.index for each in tensors] == [0, 1]
    for one, other in itertools.permutations(tensors):
        assert one.to(other.device).device == other.device
