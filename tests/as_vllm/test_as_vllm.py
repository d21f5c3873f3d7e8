"""`python -m quire.as_vllm`: programs that import vLLM run on Quire. The programs are processes of their own."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.oracles.film_files import film_file, grey_frames

from quire.as_vllm import pictures
from quire.as_vllm.faces import LLM, FlexibleArgumentParser
from quire.as_vllm.names import ABSENT, MODULES, PROGRAMS, why_absent
from quire.as_vllm.pictures import (
    AudioAsset,
    ImageAsset,
    VideoAsset,
    convert_image_mode,
    encode_image_url,
    fetch_image,
    load_audio,
)
from quire.as_vllm.sample_prompts import add_dataset_parser, get_samples
from quire.entrypoints.cli.main import COMMANDS
from quire.entrypoints.pooling import PoolingMethods
from quire.errors import ConfigError
from quire.outputs import PoolingOutput, PoolingRequestOutput

NAMES = {
    "vllm": "LLM LLMEngine AsyncLLMEngine EngineArgs AsyncEngineArgs SamplingParams PoolingParams "
    "RequestOutput TextPrompt TokensPrompt __version__",
    "vllm.sampling_params": "RequestOutputKind StructuredOutputsParams GuidedDecodingParams BeamSearchParams",
    "vllm.utils.argparse_utils": "FlexibleArgumentParser",
    "vllm.utils": "FlexibleArgumentParser random_uuid",
    "vllm.utils.network_utils": "get_open_port get_ip",
    "vllm.utils.print_utils": "print_embeddings",
    "vllm.utils.system_utils": "set_ulimit",
    "vllm.engine.arg_utils": "EngineArgs",
    "vllm.engine.async_llm_engine": "AsyncLLMEngine",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.lora.request": "LoRARequest",
    "vllm.config": "ProfilerConfig PoolerConfig VllmConfig KVTransferConfig CompilationConfig",
    "vllm.config.kv_transfer": "KVTransferConfig",
    "vllm.distributed": "cleanup_dist_env_and_memory",
    "vllm.logger": "init_logger",
    "vllm.outputs": "RequestOutput",
    "vllm.inputs": "TextPrompt",
    "vllm.platforms": "current_platform",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.version": "__version__",
    "vllm.v1.metrics.reader": "Counter Gauge Histogram Vector",
    "vllm.v1.sample.logits_processor": "LogitsProcessor BatchUpdate AdapterLogitsProcessor RequestLogitsProcessor",
    "vllm.v1.sample.logits_processor.builtin": "process_dict_updates",
    "vllm.v1.worker.gpu.sample.logits_processor": "LogitsContext LogitsProcessor LogitsProcRequestState",
    "vllm.utils.gpu_sync_debug": "gpu_sync_allowed",
    "vllm.utils.torch_utils": "async_tensor_h2d",
    "vllm.tokenizers": "TokenizerLike cached_get_tokenizer cached_tokenizer_from_config",
    "vllm.transformers_utils.tokenizer": "get_tokenizer",
    "vllm.transformers_utils.repo_utils": "hf_api",
    "vllm.exceptions": "VLLMValidationError",
    "vllm.model_executor.models": "ModelRegistry",
    "vllm.envs": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
    "vllm.logprobs": "Logprob",
    "vllm.entrypoints.llm": "LLM",
    "vllm.tool_parsers": "ToolParser ToolParserManager",
    "vllm.tool_parsers.abstract_tool_parser": "ToolParser",
    "vllm.reasoning": "ReasoningParser ReasoningParserManager",
    "vllm.reasoning.basic_parsers": "BaseThinkingReasoningParser",
    "vllm.entrypoints.openai.engine.protocol": "DeltaMessage ExtractedToolCallInformation FunctionCall ToolCall",
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.protocol": "ChatCompletionRequest DeltaToolCall",
    "vllm.assets.audio": "AudioAsset",
    "vllm.benchmarks.datasets": "add_dataset_parser get_samples",
    "vllm.assets.image": "ImageAsset",
    "vllm.assets.video": "VideoAsset",
    "vllm.multimodal.image": "convert_image_mode",
    "vllm.multimodal.media.audio": "load_audio",
    "vllm.multimodal.utils": "encode_image_url fetch_image",
    "vllm.model_executor.model_loader": "ShardedStateLoader",
}
"""Names that vLLM's examples import and Quire has, and those that other scripts import most, by module."""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire.as_vllm", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def answers(text: str) -> dict[str, object]:
    """The last line of what a program printed, which is JSON."""
    return json.loads(text.strip().splitlines()[-1])


def test_every_name_that_scripts_import_is_there(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    lines = [f"from {module} import {', '.join(names.split())}" for module, names in NAMES.items()]
    lines += ["import vllm.sampling_params, vllm", "assert vllm.LLM is LLM"]
    script.write_text("\n".join(lines), encoding="utf-8")
    done = run(str(script))
    assert done.returncode == 0, done.stderr


def test_every_module_of_the_table_has_its_sources_and_every_reason_is_about_no_name_that_is_there() -> None:
    for sources in MODULES.values():
        assert all(importlib.import_module(source) for source in sources)
    assert not set(ABSENT) & set(MODULES) - {"vllm.platforms"}
    assert "KV connectors" in why_absent("vllm.distributed.kv_transfer.kv_connector.v1")
    assert why_absent("vllm.nothing") == why_absent("vllm.v2.x")


PARSERS = """
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.engine.protocol import DeltaMessage, ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.tool_parsers import ToolParser, ToolParserManager

@ToolParserManager.register_module("arrow")
class Arrow(ToolParser):
    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        content, _, call = model_output.partition("=>")
        calls = [ToolCall(function=FunctionCall(name=call, arguments="{}"))] if call else []
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content or None)
    def extract_tool_calls_streaming(self, *parts, request: ChatCompletionRequest) -> DeltaMessage | None:
        return None

@ReasoningParserManager.register_module("stars")
class Stars(BaseThinkingReasoningParser):
    @property
    def start_token(self) -> str:
        return "<*>"
    @property
    def end_token(self) -> str:
        return "</*>"
"""


def test_parsers_of_a_plugin_of_vllms_parse_with_no_word_changed(tmp_path: Path) -> None:
    plugin, script = tmp_path / "parsers.py", tmp_path / "script.py"
    plugin.write_text(PARSERS, encoding="utf-8")
    script.write_text(
        "import json, sys\n"
        "from quire.parsers.choice import choose_formats\n"
        "from quire.parsers.plugin import load_parser_file\n"
        "from quire.parsers.stream import parse_answer\n"
        "load_parser_file(sys.argv[1], 'tool_parser_plugin')\n"
        "chosen = choose_formats('stars', 'arrow', None)\n"
        "tools = [{'type': 'function', 'function': {'name': 'f'}}]\n"
        "formats = {'reasoning': chosen.reasoning, 'tools': chosen.tools, 'offered': tools}\n"
        "answer = parse_answer('<*>why</*>well=>f', **formats)\n"
        "print(json.dumps([answer.reasoning, answer.content, [call.name for call in answer.calls]]))\n",
        encoding="utf-8",
    )
    done = run(str(script), str(plugin))
    assert done.returncode == 0, done.stderr
    assert answers(done.stdout) == ["why", "well", ["f"]]


SCRIPT = """
import json, sys
from vllm import LLM, EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.reader import Counter
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

class Only(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        self.of_row = {}
    def is_argmax_invariant(self):
        return False
    def update_state(self, batch_update):
        process_dict_updates(self.of_row, batch_update, lambda params, _, __: (params.extra_args or {}).get("only"))
    def apply(self, logits):
        for row, token in self.of_row.items():
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept
        return logits

class OnlyLast(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False
    def new_req_logits_processor(self, params):
        token = (params.extra_args or {}).get("last")
        if token is None:
            return None
        def edit(output_ids, logits):
            if len(output_ids) == 2:
                logits[:] = float("-inf")
                logits[token] = 0.0
            return logits
        return edit

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_num_seqs=8)
    parser.add_argument("--max_tokens", type=int)
    parser.add_argument("--api-port", type=parser.check_port)
    args = vars(parser.parse_args())
    assert args.pop("api_port") is None
    params = {"temperature": 0.0, "max_tokens": args.pop("max_tokens"), "ignore_eos": True}
    llm = LLM(**{**args, "logits_processors": [Only, OnlyLast], "disable_log_stats": False})
    given = [{}, {"only": 65}, {"last": 66}, {}]
    many = [SamplingParams(**params, extra_args=extra) for extra in given]
    together = [each.outputs[0].token_ids for each in llm.generate(["one two"] * 4, many)]
    counters = [each.name for each in llm.get_metrics() if isinstance(each, Counter)]
    print()
    print(json.dumps({"together": together, "counters": counters, "seqs": args["max_num_seqs"], "argv": sys.argv[1:]}))
"""


def test_a_script_with_flags_and_logits_processors_of_vllms_runs_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = run(str(script), "--max_tokens", "3", "--max-model-len", "256", "--kv_cache_memory_bytes", "16M")
    assert done.returncode == 0, done.stderr
    found = answers(done.stdout)
    plain, only, last, again = found["together"]  # type: ignore[misc]
    assert only == [65] * 3 and plain == again != only
    assert last == [*plain[:2], 66]
    assert found["seqs"] == 8 and found["argv"][0] == "--max_tokens"  # type: ignore[index]
    assert "vllm:generation_tokens" in found["counters"]  # type: ignore[operator]


def test_what_a_pooler_gives_is_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self, prompts, *_, **__) -> list[PoolingRequestOutput[PoolingOutput]]:
        return [PoolingRequestOutput(text, PoolingOutput(np.array([3.0, 4.0])), [1], True) for text in prompts]

    monkeypatch.setattr(PoolingMethods, "encode", encode)
    (output,) = LLM.__new__(LLM).encode(["a"])
    assert type(output.outputs.data).__name__ == "Tensor" and output.outputs.data.tolist() == [3.0, 4.0]


class Words:
    """A tokenizer whose tokens are numbers."""

    def __len__(self) -> int:
        return 500

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_scripts_measure_with_the_data_sets_of_the_benchmarks() -> None:
    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    parser.add_argument("--output-len", type=int, default=7)
    args = parser.parse_args(["--num-prompts", "3", "--random-input-len", "5"])
    samples = get_samples(args, Words())
    assert [(each.prompt_len, each.expected_output_len, len(each.prompt.split())) for each in samples] == [
        (5, 7, 5)
    ] * 3
    assert len({each.prompt for each in samples}) == 3 and samples[0].multi_modal_data is None


def test_children_of_a_program_see_the_same_package(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import json, multiprocessing, subprocess, sys\n"
        "import vllm\n"
        "from vllm.sampling_params import SamplingParams\n"
        "def ask(queue):\n"
        "    queue.put(SamplingParams.__module__)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=ask, args=(queue,))\n"
        "    child.start()\n"
        "    spawned = queue.get()\n"
        "    child.join()\n"
        "    text = 'from vllm import LLM; print(LLM.__module__)'\n"
        "    started = subprocess.run([sys.executable, '-c', text], capture_output=True, text=True).stdout.split()[-1]\n"
        "    print(json.dumps({'spawned': spawned, 'started': started}))\n",
        encoding="utf-8",
    )
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert answers(done.stdout) == {"spawned": "quire.sampling_params", "started": "quire.as_vllm.faces"}


def test_what_quire_does_not_have_is_an_import_error_and_the_log_says_why() -> None:
    text = (
        "import vllm.utils\n"
        "for line in ('from vllm.attention import Attention', 'from vllm.sampling_params import Unheard',\n"
        "             'import vllm.distributed.kv_transfer.kv_pipe'):\n"
        "    try:\n"
        "        exec(line)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "print(hasattr(vllm.utils, 'unheard'))"
    )
    done = run("-c", text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No module named") == 2 and "cannot import name 'Unheard'" in done.stdout
    assert (
        "attention backends have Quire's interface" in done.stdout
        and "connectors are classes of plugins" in done.stdout
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_vllms_variables_are_read_where_quires_are_not_set() -> None:
    text = (
        "import json; from vllm import envs; from quire import envs as own\n"
        "print(json.dumps([envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE, own.QUIRE_ENABLE_MULTIPROCESSING, own.QUIRE_LOGGING_LEVEL]))"
    )
    variables = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "7", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    variables |= {"VLLM_LOGGING_LEVEL": "DEBUG", "QUIRE_LOGGING_LEVEL": "ERROR"}
    done = run("-c", text, **variables)
    assert answers(done.stdout) == [7, False, "ERROR"], done.stderr


def test_modules_that_are_programs_run() -> None:
    done = run("-m", "vllm.entrypoints.openai.api_server", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: quire serve"), done.stderr
    assert {words[0] for words in PROGRAMS.values() if words} <= set(COMMANDS)


def test_a_wrong_flag_of_a_script_ends_it_as_argparse_does() -> None:
    text = "from vllm.utils import FlexibleArgumentParser as P; p = P(prog='mine'); p.add_argument('--size'); p.parse_args()"
    done = run("-c", text, "--sise", "3")
    assert done.returncode == 2 and done.stderr.strip().endswith(
        "mine: error: unrecognized arguments: --sise 3 (did you mean --size?)"
    )


def test_the_command_passes_all_words_on(tmp_path: Path) -> None:
    script = tmp_path / "words.py"
    script.write_text("import sys; print(sys.argv[1:])", encoding="utf-8")
    words = ["--model_name", "x", "--help", "--", "-1"]
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "as-vllm", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == repr(words), done.stderr
    help_text = subprocess.run([*command[:4], "--help"], capture_output=True, text=True, timeout=60)
    assert help_text.stdout.startswith("usage: quire as-vllm")


def test_a_process_without_the_command_does_not_see_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import quire, importlib.util; print(importlib.util.find_spec('vllm'))"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "None"


def test_a_picture_goes_through_an_address_and_keeps_what_is_seen_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image = pytest.importorskip("PIL.Image")
    half = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    half.putpixel((1, 0), (0, 0, 0, 0))
    again = fetch_image(encode_image_url(half))
    assert [again.getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]
    assert convert_image_mode(half, "L").mode == "L" and convert_image_mode(again, "RGB") is again


def test_frames_of_a_sample_video_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    folder = tmp_path / "assets/video-example-data"
    folder.mkdir(parents=True)
    (folder / "sample_demo_1.mp4").write_bytes(film_file(grey_frames(40)))
    film = VideoAsset("baby_reading", num_frames=4)
    assert film.np_ndarrays.shape[0] == len(film.pil_images) == 4 and film.metadata["frames_indices"][-1] == 39


def test_samples_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image, soundfile = pytest.importorskip("PIL.Image"), pytest.importorskip("soundfile")
    for folder in ("vision_model_images", "multimodal_asset"):
        (tmp_path / "there" / folder).mkdir(parents=True)
    at = f"{(tmp_path / 'there').as_uri()}/"
    monkeypatch.setattr(pictures, "SAMPLES", at)
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "here"))
    with pytest.raises(ConfigError, match=r"put a file at .*here/assets/vision_model_images/cherry_blossom\.jpg"):
        ImageAsset("cherry_blossom").pil_image  # noqa: B018  (a property that raises)
    Image.new("RGB", (2, 1)).save(tmp_path / "there/vision_model_images/cherry_blossom.jpg")
    soundfile.write(tmp_path / "there/multimodal_asset/winning_call.ogg", np.zeros((1600, 2), np.float32), 8000)
    for _ in range(2):  # the second time from the folder
        assert ImageAsset("cherry_blossom").pil_image.size == (2, 1)
        assert fetch_image(f"{at}vision_model_images/cherry_blossom.jpg").size == (2, 1)
        sound = AudioAsset("winning_call")
        samples, rate = sound.audio_and_sample_rate
        assert sound.url == f"{at}multimodal_asset/winning_call.ogg" and samples.shape == (1600,) and rate == 8000
        samples, rate = load_audio(str(sound.get_local_path()), sr=16000)
        assert (len(samples), rate) == (3200, 16000)
        shutil.rmtree(tmp_path / "there", ignore_errors=True)


def test_weights_that_were_left_out_are_read_by_the_two_calls_of_vllm_and_written_by_a_third(tmp_path: Path) -> None:
    asked = {"temperature": 0.0, "max_tokens": 8}
    from quire import SamplingParams

    with LLM(load_format="dummy", max_model_len=256) as llm:
        (random,) = llm.generate("Count from 1 to 5", SamplingParams(**asked), use_tqdm=False)
        with pytest.raises(ConfigError, match="load_format can"):
            llm.collective_rpc("update_config", args=({"cache_config": {}},))
        assert llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},)) == [None]
        assert llm.collective_rpc("reload_weights") == [None]
        (read,) = llm.generate("Count from 1 to 5", SamplingParams(**asked), use_tqdm=False)
    with LLM(max_model_len=256) as llm:
        (expected,) = llm.generate("Count from 1 to 5", SamplingParams(**asked), use_tqdm=False)
        llm.llm_engine.engine_core.save_sharded_state(path=str(tmp_path), pattern=None, max_size=None)
    assert read.outputs[0].token_ids == expected.outputs[0].token_ids != random.outputs[0].token_ids
    assert (tmp_path / "model-rank-0-part-0.safetensors").exists()
