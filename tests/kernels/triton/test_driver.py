"""Our launcher packs arguments as C would, and tells the driver what Triton's own launcher would tell it."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

from quire.kernels.triton.runtime import driver


class Library:
    """What the launcher calls of the driver's library; keeps what it was given."""

    def __init__(self):
        self.launches = []
        self.code = 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        config = config._obj
        attributes = [
            (config.attributes[i].id, list(config.attributes[i].value[:3])) for i in range(config.num_attributes)
        ]
        self.launches.append(
            SimpleNamespace(
                grid=[config.grid_x, config.grid_y, config.grid_z],
                block=[config.block_x, config.block_y, config.block_z],
                shared=config.shared,
                stream=config.stream,
                attributes=attributes,
                function=function.value,
                addresses=list(parameters),
            )
        )
        return self.code

    def cuGetErrorString(self, code, text):
        text._obj.value = b"invalid argument"


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(driver, "_library", lambda: library)
    return library


def metadata(**changes):
    plain = {
        "num_warps": 4, "num_ctas": 1, "shared": 1024, "launch_pdl": False, "launch_cooperative_grid": False,
        "tensordesc_meta": None,
        "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
    }  # fmt: skip
    return SimpleNamespace(**(plain | changes))


def launcher(signature, **changes):
    return driver.Launcher(SimpleNamespace(signature=signature), metadata(**changes))


def value_at(address, code):
    return struct.unpack(code, ctypes.string_at(address, struct.calcsize(code)))[0]


SIGNATURE = {"x": "*bf16", "n": "i32", "y": "*fp32", "eps": "fp32", "BLOCK": "constexpr", "flag": "u1", "big": "i64"}


def test_arguments_lie_where_the_kernel_reads_them(library):
    x, y = torch.empty(8), torch.empty(8)
    kernel = launcher(SIGNATURE)
    kernel(2, 3, 4, 77, 99, None, None, None, None, x, -5, y, 0.5, 1024, True, 1 << 40)
    (launch,) = library.launches
    values = [
        value_at(at, code) for at, code in zip(launch.addresses, ["Q", "i", "Q", "f", "B", "q", "Q", "Q"], strict=True)
    ]
    assert values == [x.data_ptr(), -5, y.data_ptr(), 0.5, 1, 1 << 40, 0, 0]
    assert (launch.grid, launch.block, launch.shared, launch.stream, launch.function) == (
        [2, 3, 4], [128, 1, 1], 1024, 77, 99,
    )  # fmt: skip
    assert launch.attributes == []


def test_the_layout_is_that_of_a_structure():
    class Reference(ctypes.Structure):
        _fields_ = [
            ("a", ctypes.c_int8), ("b", ctypes.c_uint64), ("c", ctypes.c_int16), ("d", ctypes.c_float), ("e", ctypes.c_double),
            ("f", ctypes.c_int8), ("g", ctypes.c_int32),
        ]  # fmt: skip

    layout = driver.Layout(["b", "Q", "h", "f", "d", "b", "i"])
    assert layout.offsets == [getattr(Reference, name).offset for name, _ in Reference._fields_]


def test_nothing_and_addresses_are_pointers_too(library):
    launch = launcher({"x": "*bf16", "y": "*bf16"})
    launch(1, 1, 1, 0, 1, None, None, None, None, None, 4096)
    assert [value_at(at, "Q") for at in library.launches[0].addresses[:2]] == [0, 4096]


def test_dependent_and_cooperative_launches_and_clusters_are_attributes(library):
    launch = launcher({}, launch_pdl=True, launch_cooperative_grid=True, num_ctas=2)
    launch(3, 1, 1, 0, 1, None, None, None, None)
    assert library.launches[0].attributes == [(6, [1, 0, 0]), (2, [1, 0, 0]), (4, [2, 1, 1]), (5, [1, 0, 0])]
    assert library.launches[0].grid == [6, 1, 1]


def test_an_empty_grid_launches_nothing(library):
    launcher({})(4, 0, 1, 0, 1, None, None, None, None)
    assert library.launches == []


def test_hooks_are_called_around_a_launch(library):
    seen = []
    launcher({})(
        1, 1, 1, 0, 1, None, "about it", lambda data: seen.append(("enter", data)), lambda data: seen.append("exit")
    )
    assert seen == [("enter", "about it"), "exit"]


def test_scratch_memory_comes_from_tritons_allocator(library, monkeypatch):
    from triton.runtime import _allocation

    asked = []

    def allocate(size, align, stream):
        asked.append((size, align, stream))
        return SimpleNamespace(data_ptr=lambda: 12345)

    monkeypatch.setattr(_allocation, "_allocator", SimpleNamespace(get=lambda: allocate))
    launch = launcher({"n": "i32"}, global_scratch_size=128, global_scratch_align=64)
    launch(2, 2, 1, 7, 1, None, None, None, None, 3)
    assert asked == [(512, 64, 7)]
    assert [value_at(at, "Q") for at in library.launches[0].addresses[1:]] == [12345, 0]


def test_a_tensor_map_takes_its_own_alignment(library, monkeypatch):
    monkeypatch.setattr(driver, "encode_tensor_map", lambda descriptor, meta: bytes(range(128)))
    descriptor = SimpleNamespace(base=torch.empty(42), shape=[6, 7], strides=[7, 1], padding="zero")
    launch = launcher({"n": "i32", "d": "tensordesc<bf16[16, 64]>"}, tensordesc_meta=[{"swizzle": 3}])
    launch(1, 1, 1, 0, 1, None, None, None, None, 9, descriptor)
    addresses = library.launches[0].addresses
    assert addresses[1] % 64 == 0 and ctypes.string_at(addresses[1], 128) == bytes(range(128))
    assert [value_at(at, "i") for at in addresses[2:4]] == [6, 7]
    assert [value_at(at, "q") for at in addresses[4:6]] == [7, 1]


def test_a_failing_launch_names_the_drivers_reason(library):
    library.code = 1
    with pytest.raises(RuntimeError, match=r"invalid argument \(1\)"):
        launcher({})(1, 1, 1, 0, 1, None, None, None, None)


@pytest.mark.parametrize("kind", ["nvTmaDesc", "bf16", ("i32", "i32")])
def test_what_cannot_be_passed_is_left_to_tritons_own_launcher(library, kind):
    with pytest.raises(NotImplementedError):
        launcher({"x": kind})


def test_without_a_compiler_the_way_out_is_named(library, monkeypatch):
    monkeypatch.setattr(driver, "_c_compiler", lambda: None)
    src = SimpleNamespace(signature={"x": "bf16"}, fn=SimpleNamespace(__name__="product"))
    with pytest.raises(RuntimeError, match=r"product.*C compiler.*CC"):
        driver.make_launcher(src, metadata())
