"""A launch that Triton's bookkeeping was left out of launches what Triton would have launched."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.triton.test_driver import library, metadata, value_at  # noqa: F401
from triton import knobs
from triton.runtime.jit import JITFunction

from quire.kernels.triton.runtime import direct_launch, driver
from quire.kernels.triton.runtime.variants import Recorder

_, SPECIALIZE = direct_launch._stock()
MEMORY = torch.empty(4096, dtype=torch.uint8)
START = -MEMORY.data_ptr() % 256


def plain_kernel(x, y, count, eps, SIZE: "tl.constexpr", FLAG: "tl.constexpr" = False):  # noqa: F821
    """Never compiled."""


class Stock:
    """Triton's own way: keeps what it was asked for, and gives a kernel as it would have been compiled."""

    def __init__(self):
        self.asked = []

    def __call__(self, kernel, *args, grid, warmup, **named):
        self.asked.append((args, grid, warmup, named))
        if warmup or len(args) != 4:
            return None
        kinds = [SPECIALIZE(arg)[0] for arg in args]
        src = SimpleNamespace(signature=dict(zip(kernel.arg_names, [*kinds, "constexpr", "constexpr"], strict=True)))
        return SimpleNamespace(run=driver.Launcher(src, metadata()), function=100 + len(self.asked))


@pytest.fixture
def stock(monkeypatch, library):  # noqa: F811
    """The stock way, with direct launches installed before it."""
    stock = Stock()
    monkeypatch.setattr(direct_launch, "_stock", lambda: (stock, SPECIALIZE))
    monkeypatch.setattr(JITFunction, "run", JITFunction.run)
    monkeypatch.setattr(JITFunction, "__getitem__", JITFunction.__getitem__)
    stock.device = 0
    assert direct_launch.install(lambda: stock.device, lambda device: 70 + device)
    return stock


@pytest.fixture
def kernel():
    return JITFunction(plain_kernel)


def at(offset, dtype=torch.float32):
    return MEMORY[START + offset :][:64].view(dtype)


def test_what_was_launched_before_is_launched_without_triton(stock, library, kernel):  # noqa: F811
    kernel[(2, 3)](at(0), at(64), 7, 0.5, SIZE=8, num_warps=4)
    compiled = kernel[(5,)](at(128), at(16), 9, 0.25, SIZE=8, num_warps=4)
    assert len(stock.asked) == 1 and compiled.function == 101
    (launch,) = library.launches
    assert (launch.grid, launch.stream, launch.function) == ([5, 1, 1], 70, 101)
    values = [value_at(where, code) for where, code in zip(launch.addresses[:4], "QQif", strict=True)]
    assert values == [at(128).data_ptr(), at(16).data_ptr(), 9, 0.25]


def test_a_parameter_is_a_tensor_too(stock, kernel):
    kernel[(1,)](at(0), at(0), 7, 0.5, SIZE=8)
    kernel[(1,)](torch.nn.Parameter(at(0)), at(0), 7, 0.5, SIZE=8)
    assert len(stock.asked) == 1
    kernel[(1,)](torch.nn.Parameter(at(4)), at(0), 7, 0.5, SIZE=8)
    assert len(stock.asked) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"x": at(8)}, {"x": at(0, torch.int32)}, {"x": None}, {"count": 16}, {"count": 1}, {"count": 1 << 40}, {"eps": 1},
        {"SIZE": 16}, {"SIZE": "8"}, {"FLAG": True}, {"num_warps": 8}, {"maxnreg": 64},
    ],
    ids=lambda change: "-".join(change),
)  # fmt: skip
def test_whatever_triton_tells_apart_is_asked_of_triton(stock, library, kernel, change):  # noqa: F811
    usual = {"x": at(0), "y": at(0), "count": 7, "eps": 0.5, "SIZE": 8, "num_warps": 4}

    def launch(**changes):
        given = usual | changes
        args = [given.pop(name) for name in ("x", "y", "count", "eps")]
        kernel[(1,)](*args, **given)

    for changes in ({}, change, {}, change):
        launch(**changes)
    assert len(stock.asked) == 2 and len(library.launches) == 2
    assert [launch.function for launch in library.launches] == [101, 102]


def test_every_device_has_its_own(stock, library, kernel):  # noqa: F811
    for device in (0, 1, 1, 0):
        stock.device = device
        kernel[(1,)](at(0), at(0), 7, 0.5, SIZE=8)
    assert len(stock.asked) == 2
    assert [(launch.stream, launch.function) for launch in library.launches] == [(71, 102), (70, 101)]


@pytest.mark.parametrize(
    "launch",
    [
        lambda kernel: kernel[lambda meta: (1,)](at(0), at(0), 7, 0.5, SIZE=8),
        lambda kernel: kernel[(1,)](at(0), at(0), 7, eps=0.5, SIZE=8),
        lambda kernel: kernel[(1,)](at(0), at(0), 7, 0.5, 8),
        lambda kernel: kernel[(1,)](at(0), at(0), 7, 0.5, SIZE=[8]),
        lambda kernel: kernel.run(at(0), at(0), 7, 0.5, grid=(1,), warmup=True, SIZE=8),
    ],
    ids=["grid of its own", "argument by name", "constant by place", "no hash", "warmup"],
)
def test_what_is_not_plain_goes_tritons_way(stock, kernel, launch):
    launch(kernel)
    launch(kernel)
    assert len(stock.asked) == 2


def test_hooks_are_tritons_business(stock, kernel, monkeypatch):
    for _ in range(2):
        kernel[(1,)](at(0), at(0), 7, 0.5, SIZE=8)
    seen = SimpleNamespace(calls=[print])
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", seen)
    kernel[(1,)](at(0), at(0), 7, 0.5, SIZE=8)
    monkeypatch.undo()
    assert len(stock.asked) == 2


def test_a_rehearsal_launches_nothing(stock, library, kernel):  # noqa: F811
    for _ in range(2):
        kernel[(1,)](at(0), at(0), 7, 0.5, SIZE=8)
    with Recorder().collecting():
        kernel[(1,)](at(0), at(0), 7, 0.5, SIZE=8)
    assert stock.asked[-1][2] is True and len(library.launches) == 1


numbers = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-40, 40), st.integers(0, 1 << 33), st.floats(), st.booleans(), st.none()
)  # fmt: skip
pointers = st.builds(
    at, st.integers(0, 64).map(lambda i: 8 * i), st.sampled_from([torch.int8, torch.int32, torch.int64])
)


@given(st.one_of(numbers, pointers), st.one_of(numbers, pointers))
def test_arguments_of_one_class_are_one_to_triton(one, other):
    classes = [[], []]
    for arg, found in zip((one, other), classes, strict=True):
        direct_launch.classify([arg], found, SPECIALIZE)
    if classes[0] == classes[1]:
        assert SPECIALIZE(one) == SPECIALIZE(other)


@pytest.mark.parametrize(
    ("specialize", "why"),
    [
        (lambda arg: (SPECIALIZE(arg), arg == 0), "are told apart"),
        (lambda arg: (SPECIALIZE(arg), isinstance(arg, torch.Tensor) and arg.data_ptr() % 64), "are told apart"),
        (lambda arg: SPECIALIZE(object()), "cannot be classified"),
    ],
    ids=["zeros", "wider alignment", "other arguments"],
)
def test_a_triton_that_sees_more_keeps_its_own_launches(stock, kernel, monkeypatch, specialize, why):
    assert why in direct_launch.why_unfit(specialize)
    monkeypatch.setattr(JITFunction, "run", stock)
    monkeypatch.setattr(direct_launch, "_stock", lambda: (stock, specialize))
    assert not direct_launch.install(lambda: 0, lambda device: 0)
    assert JITFunction.run is stock


def test_a_triton_without_such_functions_keeps_its_own_launches(stock, monkeypatch):
    def gone():
        raise AttributeError("native_specialize_impl")

    monkeypatch.setattr(direct_launch, "_stock", gone)
    assert not direct_launch.install(lambda: 0, lambda device: 0)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **named: None)
    assert "JITFunction.run takes" in direct_launch.why_unfit(SPECIALIZE)


def test_a_tensor_map_is_encoded_once_for_the_same_memory(library, monkeypatch):  # noqa: F811
    encoded = []

    def encode(descriptor, meta):
        encoded.append(descriptor.base.data_ptr())
        return bytes(128)

    monkeypatch.setattr(driver, "encode_tensor_map", encode)
    src = SimpleNamespace(signature={"d": "tensordesc<bf16[16, 64]>", "n": "i32"})
    launch = driver.Launcher(src, metadata(tensordesc_meta=[{}]))
    for base, rows, count in ((at(0), 4, 3), (at(0), 4, 5), (at(0), 2, 5), (at(64), 4, 5)):
        launch.submit(
            1, 1, 1, 7, 9, [SimpleNamespace(base=base, shape=[rows, 4], strides=[4, 1], padding="zero"), count]
        )
        addresses = library.launches[-1].addresses
        assert [value_at(addresses[1], "i"), value_at(addresses[5], "i")] == [rows, count]
    assert encoded == [at(0).data_ptr(), at(0).data_ptr(), at(64).data_ptr()]
