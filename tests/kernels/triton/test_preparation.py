"""Kernels are compiled beside a start, found by the next one, and shipped; what cannot be compiled ahead harms nothing."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.kernels.triton.runtime import ahead, places
from quire.kernels.triton.runtime.ahead import CompilingProcess
from quire.kernels.triton.runtime.cache import KernelCache
from quire.kernels.triton.runtime.preparation import list_name

SCRIPT = Path(__file__).with_name("preparation_start.py")
ROOT = SCRIPT.parent.parent.parent.parent
VARIANTS = [
    {"kernel": f"quire.none:k{i}", "types": {}, "constants": {"N": i}, "aligned": {}, "options": {}} for i in range(4)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model("Qwen3ForCausalLM", tmp_path_factory.mktemp("model"))


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("QUIRE_KERNEL_CACHE", raising=False)
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "package" / "compiled")
    monkeypatch.setattr(places, "SHIPPED_LISTS", tmp_path / "package" / "lists")
    places.writable_folder.cache_clear()
    yield tmp_path / "cache"
    places.writable_folder.cache_clear()


def start(model, cache, *actions, **environment):
    """What a start in a fresh process reports."""
    env = {**os.environ, "QUIRE_CACHE_ROOT": str(cache), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), *actions], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton would look for the machine's own GPU")
def test_a_first_start_compiles_beside_itself_and_later_ones_find_it_all(model, tmp_path):
    first = start(model, tmp_path / "cache", "rehearse", "wait")
    assert first["compiles"] and first["finished"] and first["ahead"] == 4
    assert first["compiled"] == first["listed"] == 4, "what a launch asks for is what was compiled ahead"
    second = start(model, tmp_path / "cache", "rehearse")
    assert not second["compiles"] and second["compiled"] == 4 and second["stamps"] == 1

    # An upgrade, or a folder that was cleaned: the list alone is enough to compile everything from the first moment.
    for kernel in (tmp_path / "cache").rglob("*.cubin"):
        kernel.unlink()
    for stamp in (tmp_path / "cache").rglob("done-*"):
        stamp.unlink()
    third = start(model, tmp_path / "cache", "wait")
    assert third["compiles"] and third["finished"] and third["ahead"] == third["compiled"] == 4

    # The folder may be shipped: another machine reads it from another place and compiles nothing.
    shipped = next((tmp_path / "cache" / "kernels").glob("*triton*"))
    moved = shipped.rename(tmp_path / "shipped")
    (tmp_path / "cache" / "kernels" / "lists").rename(moved / "lists")
    fourth = start(model, tmp_path / "other", QUIRE_KERNEL_CACHE=str(moved))
    assert not fourth["compiles"] and fourth["compiled"] == 0 and fourth["listed"] == 4


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton would look for the machine's own GPU")
def test_a_compiling_process_that_dies_leaves_the_work_to_the_launches(model, tmp_path):
    report = start(model, tmp_path / "cache", "die", "rehearse")
    assert report["compiled"] == report["listed"] == 4


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton would look for the machine's own GPU")
def test_kernels_whose_module_computes_with_torch_are_compiled_ahead_too(model, tmp_path):
    report = start(model, tmp_path / "cache", "needy", "rehearse", "wait")
    assert report["ahead"] == report["compiled"] == 4


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton would look for the machine's own GPU")
def test_a_rehearsal_that_fails_gives_what_it_has(model, tmp_path):
    report = start(model, tmp_path / "cache", "stumble", "wait")
    assert report["ahead"] == report["listed"] == 4


def test_a_kernel_s_key_does_not_depend_on_what_was_looked_at_before():
    """Triton's own does: a kernel that one process had compiled ahead was compiled again by another, inside a step."""

    def keys(seed):
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": str(seed)}
        env.pop("TRITON_INTERPRET", None)
        script = [sys.executable, str(SCRIPT.with_name("key_order.py")), str(seed)]
        return json.loads(subprocess.run(script, env=env, check=True, capture_output=True, text=True).stdout)

    first, *others = [keys(seed) for seed in range(1, 4)]
    for other in others:
        both = first.keys() & other.keys()
        assert len(both) > 10 and {name: first[name] for name in both} == {name: other[name] for name in both}


def test_a_list_is_named_after_what_decides_its_kernels(model):
    def name(**settings):
        return list_name(EngineArgs(model=str(model), device="cpu", **settings).create_engine_config(), 90)

    assert name() == name(max_num_seqs=7, seed=3)
    assert name().startswith("Qwen3ForCausalLM-float32-sm90-")
    assert name() == name(hf_overrides={"num_experts": None})
    assert len({name(), name(dtype="bfloat16"), name(block_size=32), name(hf_overrides={"hidden_size": 128})}) == 4


def test_lists_from_all_places_are_put_together(root):
    written, shipped = places.list_folders()[0], places.SHIPPED_LISTS
    places.write_list(written / "a.json", VARIANTS[:2])
    places.write_list(shipped / "a.json", VARIANTS[1:])
    assert places.find_list("a") == VARIANTS
    assert places.find_list("b") == []


@pytest.mark.parametrize("content", ["", "[]", '{"variants": [{}]}', '{"variants": [{"kernel": 3}]}', "{"])
def test_a_broken_list_is_no_list(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert places.read_list(tmp_path / "a.json") == []


def test_a_stamp_is_of_one_list_on_one_device_with_one_compiler(root, monkeypatch):
    names = {places.stamp_name(VARIANTS, 90), places.stamp_name(VARIANTS[:2], 90), places.stamp_name(VARIANTS, 80)}
    monkeypatch.setattr(places, "toolchain", lambda: "triton-99")
    places.sources.cache_clear()
    names.add(places.stamp_name(VARIANTS, 90))
    places.sources.cache_clear()
    assert len(names) == 4
    assert places.stamp_name(VARIANTS, 90) == places.stamp_name(VARIANTS[::-1], 90)


def test_a_folder_that_cannot_be_written_is_replaced(tmp_path, monkeypatch, root):
    root.parent.mkdir(exist_ok=True)
    root.write_text("a file where the folder should be")
    folder = places.writable_folder()
    assert folder.is_dir() and not folder.is_relative_to(root)


def child(monkeypatch, tmp_path, code):
    """A compiling process that does as this code says instead of compiling."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    (tmp_path / "other_compiler.py").write_text(f"import json, sys, time\n\ndef main(arguments):\n{body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ahead, "CHILD", "other_compiler:main")
    return CompilingProcess(90, 2)


ORDERS = """
for line in sys.stdin:
    order = json.loads(line)
    wanted = [*order["again"], *range(order["first"], order["first"] + len(order["variants"]))]
    if order["urgency"] == 0:
        for number in wanted: print(number, 0.5, "", flush=True)
"""
"""A child that compiles only what somebody waits for."""


def test_who_waits_for_a_kernel_goes_on_when_it_is_there(monkeypatch, tmp_path):
    process = child(monkeypatch, tmp_path, ORDERS)
    process.add(VARIANTS[:3], ahead.LATER)
    process.wait_for(VARIANTS[2])
    process.wait_for(VARIANTS[3])  # nobody asked for that one before
    assert process.has(VARIANTS[2:]) and not process.has(VARIANTS[1:]) and not process.wait(0)
    process.add(VARIANTS[1:2], ahead.FIRST)  # what was ordered for later is wanted now
    process.wait_for(VARIANTS[1])
    process.add(VARIANTS[:1], ahead.FIRST)
    process.finish()
    assert process.wait(20) and process.wait(0)
    process.close()


def test_later_lists_are_numbered_on(monkeypatch, tmp_path):
    process = child(
        monkeypatch,
        tmp_path,
        "for line in sys.stdin:\n  order = json.loads(line)\n"
        "  for i, v in enumerate(order['variants']): print(order['first'] + i, 0.25, 'no ' + v['kernel'], flush=True)",
    )
    process.add(VARIANTS[:2])
    process.add(VARIANTS[2:])
    assert process.wait(20)
    assert process.errors == {places.identity(v): f"no {v['kernel']}" for v in VARIANTS}
    process.close()


def test_a_process_that_says_nothing_and_ends_is_not_waited_for(monkeypatch, caplog, tmp_path):
    process = child(monkeypatch, tmp_path, "sys.exit('no compiler today')")
    process.add(VARIANTS)
    process.wait_for(VARIANTS[0])
    assert process.wait(20)
    process.close()
    process.add(VARIANTS[:1])
    process.wait_for(VARIANTS[0])


def test_a_folder_of_kernels_may_be_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(KernelCache, "folders", [tmp_path / "shipped", tmp_path / "own"])
    cache = KernelCache("KEY")
    files = {name: cache.put(b"x" + name.encode(), name) for name in ("k.cubin", "k.json", "k.source")}
    cache.put_group("k.json", files)
    (tmp_path / "own").rename(tmp_path / "shipped")
    group = KernelCache("KEY").get_group("k.json")
    assert group == {name: str(tmp_path / "shipped" / "KEY" / name) for name in ("k.cubin", "k.json")}
    assert Path(group["k.cubin"]).read_bytes() == b"xk.cubin"


def test_half_a_kernel_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(KernelCache, "folders", [tmp_path])
    cache = KernelCache("KEY")
    files = {name: cache.put("text", name) for name in ("k.cubin", "k.json")}
    cache.put_group("k.json", files)
    Path(files["k.cubin"]).unlink()
    assert cache.get_group("k.json") is None and cache.get_file("k.cubin") is None
