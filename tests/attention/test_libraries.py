"""Attention of other libraries over our pages: every argument means what they document, and they are chosen where asked."""

import dataclasses
import importlib.metadata
import sys
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.attention.fake_libraries import FakeFlash, FakeFlashInfer
from tests.kernels.triton.conftest import repaired_interpreter  # noqa: F401
from tests.oracles.dense_attention import draw_step
from tests.oracles.drawn_cases import expected
from tests.oracles.interpreter import cuda_kernels, repair_interpreter
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.test_device_runner import make_engine
from tests.worker.test_end_to_end import greedy_oracle, greedy_requests, make_prompts, run

from quire.attention import flashinfer, library
from quire.attention.flash import FlashBackend
from quire.attention.flashinfer import FlashInferBackend
from quire.attention.interface import AttentionParams, AttentionRequest
from quire.attention.paged import PagedBackend
from quire.attention.selector import select_backend
from quire.attention.triton import TritonBackend
from quire.config.engine import AttentionConfig
from quire.conformance.cases.batches import Batch, make_batch
from quire.errors import ConfigError
from quire.kernels.triton.attention.page_tables import gather_tables
from quire.kernels.triton.launch import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="tensors are on the host")

REQUEST = AttentionRequest(num_heads=4, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16, block_size=16)
CANDIDATES = [
    *("quire.attention.flash:FlashBackend", "quire.attention.flashinfer:FlashInferBackend"),
    *("quire.attention.triton:TritonBackend", "quire.attention.reference:ReferenceBackend"),
]


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with cuda_kernels():
        yield


@pytest.fixture
def libraries(monkeypatch):
    """Both are installed, on a Hopper."""
    fakes = {"flash": FakeFlash(), "flashinfer": FakeFlashInfer()}
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", fakes["flash"].module())
    monkeypatch.setitem(sys.modules, "flashinfer.decode", fakes["flashinfer"].module())
    found, versions = importlib.metadata.version, {"flash-attn-4": "4.0.0b36", "flashinfer-python": "0.7.2"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or found(name))
    monkeypatch.setattr(library, "capability", lambda: (9, 0))
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    flashinfer._workspace.cache_clear()
    return fakes


def check_step(backend, batch: Batch) -> None:
    prepared, out_TC = batch.prepared(), batch.new_out()
    norms = (batch.q_norm_H, batch.k_norm_H, batch.eps)
    backend.begin_step(batch.metadata)
    backend.attend(batch.qkv_TC, batch.kv_cache, batch.metadata, batch.params, out_TC, batch.rope, *norms)
    tokens = int(batch.metadata.shape[0])
    torch.testing.assert_close(out_TC[:tokens], expected(prepared)[:tokens], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch.kv_cache, prepared.kv_cache, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("query_lens", "layer"),
    [
        ([1, 2, 1], {"soft_cap": 8.0, "window": 12}),
        ([1, 5, 1], {"window": 12, "has_sinks": True}),
        ([5, 3, 7], {"soft_cap": 8.0, "has_norm": True, "rotary_dim": 16}),
    ],
)
def test_flash_computes_what_the_reference_does(libraries, query_lens, layer):
    check_step(FlashBackend(), make_batch([40, 5, 50], query_lens, padding=2, **layer))
    assert libraries["flash"].calls == [(5, max(query_lens))]


def test_a_step_that_a_library_refuses_is_computed_by_our_own_kernels(libraries, monkeypatch):
    backend, said = FlashBackend(), []

    def refuse(*args, **given):
        raise AssertionError("no such kernel")

    monkeypatch.setattr(backend, "_attend", refuse)
    monkeypatch.setattr(library.logger, "warning_once", lambda message, *args: said.append(message % args))
    check_step(backend, make_batch([40, 5, 50], [1, 5, 1], window=12, has_sinks=True))
    assert len(said) == 1 and "flash-attn-4 computes no such step (AssertionError: no such kernel)" in said[0]


@pytest.mark.parametrize("window", [0, 1, 9])
def test_flash_sees_to_both_sides(libraries, window):
    check_step(FlashBackend(), make_batch([12, 7], [12, 7], causal=False, window=window))


@pytest.mark.parametrize("layout", ["planes", "shared"])
@pytest.mark.parametrize("name", ["flash", "flashinfer"])
def test_pages_are_read_where_they_lie(libraries, name, layout):
    params = AttentionParams(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    step = draw_step([(2 if name == "flash" else 1, 20), (1, 5), (1, 33)], params, layout=layout)
    backend, out_TC = {"flash": FlashBackend, "flashinfer": FlashInferBackend}[name](), step.new_out()
    backend.begin_step(step.metadata)
    backend.forward(step.qkv_TC, step.kv_cache, step.metadata, params, out_TC)
    torch.testing.assert_close(out_TC, step.expected(), atol=1e-5, rtol=1e-5)
    assert libraries[name].calls


@pytest.mark.parametrize("layer", [{}, {"window": 12, "has_sinks": True}, {"has_norm": True, "rotary_dim": 16}])
def test_flashinfer_decodes_as_the_reference_does(libraries, layer):
    batch = make_batch([40, 33, 5, 90], padding=2, **layer)
    check_step(FlashInferBackend(), batch)
    assert libraries["flashinfer"].calls == [6]


def test_flashinfer_gets_sinks_as_floats(libraries):
    batch = make_batch([40, 33], has_sinks=True)
    sinks = batch.params.sinks.bfloat16()
    batch.params = dataclasses.replace(batch.params, sinks=sinks)
    check_step(FlashInferBackend(), batch)


def test_flash_leaves_decoding_to_our_own_kernels(libraries):
    check_step(FlashBackend(), make_batch([40, 33], [1, 1]))
    assert libraries["flash"].calls == []


def test_flashinfer_leaves_prompts_to_our_own_kernels(libraries):
    check_step(FlashInferBackend(), make_batch([40, 33], [1, 3]))
    assert libraries["flashinfer"].calls == []


def test_tables_follow_the_rows_of_each_step(libraries):
    """Two descriptions of one step, and the same buffers in the next one."""
    batch = make_batch([40, 33, 5])
    backend, metadata = FlashInferBackend(), batch.metadata
    sampled = dataclasses.replace(metadata, rows=metadata.rows.clone(), seq_lens=metadata.seq_lens.clone())
    sampled.rows[2] = len(metadata.block_table)  # what stands for no row
    sampled.seq_lens[2] = 0
    for rows in ([0, 1, 2], [2, 0, 1]):
        metadata.rows.copy_(metadata.rows[rows])
        metadata.seq_lens.copy_(metadata.seq_lens[rows])
        for described in (metadata, sampled):
            backend.begin_step(described)
            tables, lens = backend._tables[described.block_table.data_ptr(), described.rows.data_ptr()]
            for b, length in enumerate(described.seq_lens.tolist()):
                row = min(int(described.rows[b]), len(metadata.block_table) - 1)
                pages = -(-max(length, 1) // metadata.block_size)
                assert torch.equal(tables[b, :pages], metadata.block_table[row, :pages])
                assert int(lens[b]) == max(length, 1)


def test_no_more_than_the_requests_pages_are_gathered():
    metadata = make_batch([40, 33, 5]).metadata
    tables, lens = (
        torch.full((4, metadata.block_table.shape[1]), -7, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
    )
    gather_tables(metadata, tables, lens)
    assert (tables[2, 1:] == -7).all() and (tables[3] == -7).all() and lens.tolist() == [40, 33, 5, 0]


class AnyFlash(FlashBackend):
    """For models in float32 too; keys are written without the interpreter."""

    supports = TritonBackend.supports
    rope_and_cache = PagedBackend.rope_and_cache


def test_steps_of_a_runner_are_served_eagerly_and_replayed(libraries, monkeypatch, tmp_path):
    """Two groups of layers, one of which sees a window; prompts in chunks."""
    prompts = make_prompts((4, 18))
    path = make_tiny_model("Gemma3ForCausalLM", tmp_path)
    repair_interpreter()
    engine = make_engine(monkeypatch, path, max_num_batched_tokens=16, attention_backend=f"{__name__}:AnyFlash")
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(path, prompts)
    assert engine.platform.last_runtime.counts["replayed"] > 0
    longest = [longest for _, longest in libraries["flash"].calls]
    assert longest and min(longest) > 1


@pytest.mark.parametrize(
    ("name", "change", "capability", "why"),
    [
        ("flash", {}, (8, 0), "compute capability 8.0: its pages need 9.0, 10 or 11"),
        ("flash", {}, (12, 0), "compute capability 12.0"),
        ("flash", {"head_dim": 192}, (10, 0), "heads of 192 on compute capability 10: up to 128, or 256"),
        ("flash", {"head_dim": 72}, (9, 0), "heads of 72: multiples of 16"),
        ("flash", {"kv_dtype": torch.float8_e4m3fn}, (9, 0), "pages of float8_e4m3fn: our own kernels only"),
        ("flash", {"kv_dtype": torch.float32}, (9, 0), "pages of float32"),
        ("flash", {"deterministic": True}, (9, 0), "--deterministic"),
        ("flash", {"has_alibi": True}, (9, 0), "slopes"),
        ("flash", {"chunk": 8}, (9, 0), "chunks"),
        ("flash", {"head_dim": 20}, (9, 0), "head_dim 20"),
        ("flash", {"kind": "mla", "num_kv_heads": 1, "latent": 512}, (9, 0), "latents"),
        ("flashinfer", {}, (8, 9), "compute capability 8.9: its kernels need 9.0, 10 or 12"),
        ("flashinfer", {"soft_cap": 30.0}, (9, 0), "soft caps"),
        ("flashinfer", {"causal": False}, (9, 0), "attention to both sides"),
        ("flashinfer", {"block_size": 256}, (9, 0), "pages of 256 tokens: 16, 32, 64 or 128"),
        ("flashinfer", {"head_dim": 80}, (10, 0), "heads of 80 on compute capability 10: 64, 128, 256"),
        ("flashinfer", {"head_dim": 72}, (9, 0), "heads of 72: multiples of 16"),
    ],
)
def test_what_a_library_cannot_serve_is_refused_with_the_reason(libraries, monkeypatch, name, change, capability, why):
    monkeypatch.setattr(library, "capability", lambda: capability)
    with pytest.raises(ConfigError) as caught:
        select_backend([REQUEST, dataclasses.replace(REQUEST, **change)], CANDIDATES, forced=name)
    assert f"{name}: no: " in str(caught.value) and why in str(caught.value)


@pytest.mark.parametrize("name", ["flash", "flashinfer"])
def test_a_library_that_is_not_installed_names_the_extra(name):
    with pytest.raises(ConfigError, match=rf"{name}: no: \S+ is not installed: \S+ -m pip install '?\S+"):
        select_backend([REQUEST], CANDIDATES, forced=name)
    selection = select_backend([REQUEST], CANDIDATES)
    assert selection.backend.name == "triton" and "is not installed" in selection.reasons[name]


def test_a_library_is_used_when_it_is_named_and_not_before(libraries):
    selection = select_backend([REQUEST], CANDIDATES)
    assert selection.backend.name == "triton"
    assert selection.reasons["flash"] == "could serve: --attention-backend flash to use it"
    assert select_backend([REQUEST], CANDIDATES, forced="flash").backend is FlashBackend


def test_a_flash_attention_of_other_arguments_is_refused(libraries, monkeypatch):
    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd", lambda q, k, v, out=None: None)
    with pytest.raises(ConfigError, match=r"takes no cu_seqlens_q, seqused_k, .*num_splits; 4\.0\.0b36 does"):
        FlashBackend()


@pytest.mark.parametrize(
    ("module", "backend"), [("flash_attn.cute.interface", FlashBackend), ("flashinfer.decode", FlashInferBackend)]
)
def test_a_library_that_cannot_be_imported_is_refused(libraries, monkeypatch, module, backend):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=rf"attention_backend='{backend.name}'.*cannot be imported \(ModuleNotFoundError"
    ):
        backend()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("auto", None), (None, None), ("FLASH_ATTN", "flash"), ("FLASHINFER", "flashinfer"), ("TRITON_ATTN", "triton"),
        ("CPU_ATTN", "cpu"), ("Flash", "flash"), ("mine.attention:Mine", "mine.attention:Mine"), ("FLUSH", "FLUSH"),
    ],
)  # fmt: skip
def test_other_engines_names_are_taken(given, meant):
    assert AttentionConfig(given).backend == meant
