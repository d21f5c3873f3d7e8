"""Models of a hub by name, from an empty cache, through the commands and `LLM` as a user starts them."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file
from tests.oracles.fake_hub import FakeHub
from tests.oracles.gguf_models import write_gguf
from tests.oracles.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hub():
    hub = FakeHub()
    yield hub
    hub.close()


_COMMANDS = """
import contextlib, io, json, sys
from quire.entrypoints.cli.main import main
if __name__ == "__main__":
    for line in sys.stdin:
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            try:
                code = main(json.loads(line))
            except SystemExit as end:
                code = end.code
        print(json.dumps([code, printed.getvalue(), errors.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def commands(hub, tmp_path_factory):
    """A process that runs commands one after another: imports take longer than what is tested."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "commands.py").write_text(_COMMANDS)
    process = subprocess.Popen(
        [sys.executable, folder / "commands.py"], env=hub.environment(folder), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


@pytest.fixture
def quire(hub, commands, tmp_path):
    """Runs a command with an empty cache; gives its exit code, what it printed and its errors."""
    hub.seen.clear()

    def run(*words):
        commands.stdin.write(json.dumps([*map(str, words), "--download-dir", str(tmp_path / "cache")]) + "\n")
        commands.stdin.flush()
        while not (line := commands.stdout.readline()).startswith("["):
            assert line, "the process has ended"
        return json.loads(line)

    return run


SMALL = ("--max-model-len", "64", "--max-num-seqs", "4", "--num-gpu-blocks-override", "40", "--dtype", "float32")


def answers(quire, tmp_path, model, *flags):
    (tmp_path / "in.txt").write_text("one two three\n")
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    flags = ("-i", tmp_path / "in.txt", "-o", out, "--max-tokens", "5", "--temperature", "0", *SMALL, *flags)
    code, _, errors = quire("generate", model, *flags)
    assert code == 0, errors
    return [json.loads(line)["outputs"][0] for line in out.read_text().splitlines()]


def test_a_first_start_from_an_empty_cache_answers_as_the_folder_does(hub, quire, tmp_path, checkpoint):
    hub.add("owner/tiny", checkpoint)
    found = answers(quire, tmp_path, "owner/tiny")
    assert found[0]["text"]
    assert found == answers(quire, tmp_path, checkpoint)
    assert hub.fetched(".safetensors") == ["model.safetensors"]


@pytest.mark.parametrize("flags", [("--tensor-parallel-size", "2")])
def test_of_several_ranks_one_process_fetches(hub, quire, tmp_path, checkpoint, flags):
    hub.add("owner/tiny", checkpoint)
    assert answers(quire, tmp_path, "owner/tiny", *flags)[0]["text"]
    assert hub.fetched(".safetensors") == ["model.safetensors"]


def test_a_core_in_a_process_of_its_own_gets_weights_that_its_parent_fetched(hub, quire, tmp_path, checkpoint):
    hub.add("owner/tiny", checkpoint)
    script = (
        "from quire import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM('owner/tiny', max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=40)\n"
        "    print(len(llm.generate('one', SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))\n"
    )
    environment = hub.environment(tmp_path, QUIRE_ENABLE_MULTIPROCESSING="1")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "3", done.stderr
    assert hub.fetched(".safetensors") == ["model.safetensors"]


def test_a_gguf_repositorys_model_is_named_by_its_type(hub, quire, tmp_path, checkpoint):
    kinds = ("Q8_0", "Q4_0")
    files = {f"tiny-{kind}.gguf": write_gguf(checkpoint, tmp_path / kind, "llama", {"": kind}) for kind in kinds}
    hub.add("owner/tiny-GGUF", {name: path.read_bytes() for name, path in files.items()})
    assert answers(quire, tmp_path, "owner/tiny-GGUF:Q8_0")[0]["text"]
    assert hub.fetched(".gguf") == ["tiny-Q8_0.gguf"]


def test_explain_tells_what_a_start_would_fetch_and_fetches_no_weights(hub, quire, checkpoint):
    commit = hub.add("owner/tiny", checkpoint)
    code, printed, _ = quire("explain", "owner/tiny", "--json")
    assert code == 0
    files = json.loads(printed)["files"]
    assert files["commit"] == commit
    assert files["to_fetch"].startswith(f"1 file of owner/tiny at {commit[:12]}: ")
    assert hub.fetched(".safetensors") == []
    assert "hf_right" not in quire("explain", "owner/tiny", "--hf-token", "hf_right")[1]


def test_a_type_that_only_the_weights_tell_is_read_from_their_header(hub, quire, tmp_path, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors")
    weights = (tmp_path / "model.safetensors").read_bytes()
    hub.add("owner/untold", {"config.json": json.dumps(config), "model.safetensors": weights})
    _, printed, _ = quire("explain", "owner/untold", "--json", "--skip-tokenizer-init")
    assert json.loads(printed)["config"]["model"]["dtype"] == {"value": "bfloat16", "why": "the weights' file says so"}
    assert sum(count for _, count in hub.sent("model.safetensors")) < len(weights)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}, "NobodysForCausalLM"),
        ({"hidden_size": 65536, "num_hidden_layers": 800}, "are all that the device has"),
    ],
)
def test_what_cannot_run_here_is_refused_before_its_weights_are_fetched(hub, quire, tmp_path, checkpoint, change, told):
    config = json.loads((checkpoint / "config.json").read_text()) | change
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    hub.add("owner/unfit", {**files, "config.json": json.dumps(config)})
    (tmp_path / "in.txt").write_text("one\n")
    code, _, errors = quire("generate", "owner/unfit", "-i", tmp_path / "in.txt", "-o", tmp_path / "out", *SMALL)
    assert code == 2
    assert told in errors.splitlines()[-1]
    assert hub.fetched(".safetensors") == []


def test_a_repository_that_there_is_not_ends_a_server_with_one_line(hub, tmp_path):
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", "owner/none", "--port", "0"]
    done = subprocess.run(command, env=hub.environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2
    assert "the hub has no such model, or it is private" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr
