"""`quire compile-cache`: which lists it compiles, what it leaves behind, what it says where it cannot."""

import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire.engine.arg_utils import EngineArgs
from quire.entrypoints.cli import main as cli
from quire.kernels.triton.runtime import ahead, places
from quire.kernels.triton.runtime.preparation import list_name

VARIANTS = [
    {"kernel": f"quire.none:k{i}", "types": {}, "constants": {"N": i}, "aligned": {}, "options": {}} for i in range(3)
]
COMPILER = """
import json, pathlib, sys

def compile_all(arguments):
    for line in sys.stdin:
        order = json.loads(line)
        for number, variant in enumerate(order["variants"]):
            folder = pathlib.Path(order["folder"]) / variant["kernel"].rpartition(":")[2]
            folder.mkdir(parents=True)
            (folder / f"sm{order['capability']}").touch()
            error = "LookupError: gone" if variant["kernel"].endswith("k2") else ""
            print(order["first"] + number, 0.1, error, flush=True)

def fail(arguments):
    sys.stdin.readline()
    return "no room"
"""


@pytest.fixture
def lists(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("QUIRE_KERNEL_CACHE", raising=False)
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(places, "SHIPPED_LISTS", tmp_path / "none")
    (tmp_path / "other_compiler.py").write_text(COMPILER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ahead, "CHILD", "other_compiler:compile_all")
    places.writable_folder.cache_clear()
    folder = places.list_folders()[0]
    places.write_list(folder / "A-bfloat16-sm90-1.json", VARIANTS[:2])
    places.write_list(folder / "B-bfloat16-sm90-2.json", VARIANTS[1:2])
    places.write_list(folder / "A-bfloat16-sm80-3.json", VARIANTS[2:])
    yield folder
    places.writable_folder.cache_clear()


def test_every_known_list_is_compiled_into_a_folder_that_says_so(lists, tmp_path, capsys):
    target = tmp_path / "shipped"
    assert cli.main(["compile-cache", "--output", str(target), "--capability", "90"]) == 0
    assert sorted(path.name for path in target.glob("k*")) == ["k0", "k1"]
    assert {path.name for path in (target / "lists").iterdir()} == {"A-bfloat16-sm90-1.json", "B-bfloat16-sm90-2.json"}
    assert all((target / places.stamp_name(variants, 90)).exists() for variants in (VARIANTS[:2], VARIANTS[1:2]))
    assert "2 kernels of 2 models" in capsys.readouterr().out


def test_a_kernel_that_is_gone_is_told_and_left_out(lists, tmp_path, capsys):
    target = tmp_path / "shipped"
    assert cli.main(["compile-cache", "--output", str(target), "--capability", "80"]) == 1
    assert "not compiled: LookupError: gone" in capsys.readouterr().err
    assert places.read_list(target / "lists" / "A-bfloat16-sm80-3.json") == []


def test_a_model_with_a_list_needs_no_gpu(lists, tmp_path, capsys):
    path = make_tiny_model("Qwen3ForCausalLM", tmp_path)
    name = list_name(EngineArgs(model=str(path), device="cpu").create_engine_config(), 90)
    arguments = ["compile-cache", str(path), "--device", "cpu", "--capability", "90", "--output", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert f"there is no list of the kernels of {path} ({name})" in capsys.readouterr().err
    places.write_list(lists / f"{name}.json", VARIANTS[:1])
    assert cli.main(arguments) == 0
    assert (tmp_path / "out" / "k0" / "sm90").exists()


def test_where_nothing_is_known_the_way_out_is_named(lists, capsys):
    assert cli.main(["compile-cache", "--capability", "75"]) == 2
    assert "no list of kernels for compute capability 75 is known here" in capsys.readouterr().err


def test_a_compiler_that_fails_is_an_error_and_leaves_no_stamp(lists, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ahead, "CHILD", "other_compiler:fail")
    assert cli.main(["compile-cache", "--output", str(tmp_path / "out"), "--capability", "90"]) == 1
    assert "ended before it was through" in capsys.readouterr().err
    assert list((tmp_path / "out").glob("done-*")) == []
