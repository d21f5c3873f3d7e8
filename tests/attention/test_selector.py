"""Which attention backend serves, and why."""

import dataclasses

import pytest
import torch

from quire.attention.interface import AttentionRequest
from quire.attention.reference import ReferenceBackend
from quire.attention.selector import BUILT_IN_BACKENDS, select_backend
from quire.errors import ConfigError
from quire.kernels import ops

REQUEST = AttentionRequest(num_heads=4, num_kv_heads=2, head_dim=16, kv_dtype=torch.float32, block_size=16)


class Narrow(ReferenceBackend):
    """Serves no windows."""

    name = "narrow"

    @classmethod
    def supports(cls, request):
        answer = super().supports(request)
        return dataclasses.replace(answer, yes=request.window == 0, why="no windows")


NARROW = f"{__name__}:Narrow"


@pytest.fixture(autouse=True)
def _reference_kernels(monkeypatch, kept_selection):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or type(sys)(__name__))
    monkeypatch.setattr(sys.modules[__name__], "Narrow", Narrow, raising=False)
    ops.select("any")


def test_the_first_that_serves_every_layer_is_chosen():
    assert select_backend([REQUEST], [NARROW, *BUILT_IN_BACKENDS]).backend is Narrow
    windowed = dataclasses.replace(REQUEST, window=8)
    selection = select_backend([REQUEST, windowed], [NARROW, *BUILT_IN_BACKENDS])
    assert selection.backend is ReferenceBackend
    assert selection.reasons["narrow"] == "no: no windows"


def test_the_cpu_backend_says_no_without_native_kernels_and_why():
    selection = select_backend([REQUEST], BUILT_IN_BACKENDS)
    assert selection.backend is ReferenceBackend
    assert "native kernel 'paged_attention' was not chosen" in selection.reasons["cpu"]


def test_a_name_forces_a_backend():
    selection = select_backend([REQUEST], [NARROW, *BUILT_IN_BACKENDS], forced="reference")
    assert selection.backend is ReferenceBackend
    assert list(selection.reasons) == ["reference"]


def test_a_class_path_forces_a_backend_of_ones_own():
    assert select_backend([REQUEST], BUILT_IN_BACKENDS, forced=NARROW).backend is Narrow


def test_an_unknown_name_is_refused_with_the_names():
    with pytest.raises(
        ConfigError, match=r"attention_backend='flush' is not known here; known: cpu, reference"
    ) as caught:
        select_backend([REQUEST], BUILT_IN_BACKENDS, forced="flush")
    assert caught.value.setting == "attention_backend"


def test_a_forced_backend_that_cannot_serve_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match=r"cpu: no: the native kernel 'paged_attention' was not chosen"):
        select_backend([REQUEST], BUILT_IN_BACKENDS, forced="cpu")


def test_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(ConfigError, match="4 heads do not share 3 KV heads evenly"):
        select_backend([dataclasses.replace(REQUEST, num_kv_heads=3)], BUILT_IN_BACKENDS)
