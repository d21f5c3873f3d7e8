"""Servers of Quire where vLLM's cases start vLLM's: `tests.utils` as those cases import it, and their asynchronous fixtures.

Checkpoints are stand-ins: a tiny random one for each pooling model, for every other model the built-in demo model. So a case that
asks what a certain model knows cannot be equal.
"""

import asyncio
import atexit
import base64
import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tools.vllm_faces.outcomes import Watch, internal

FOLDERS = tuple(
    f"tests/entrypoints/{name}"
    for name in ("openai", "anthropic", "serve", "pooling", "generate", "scale_out", "rl/state_transitions")
)
NOT_HERE = (
    "multimodal",
    "vision",
    "lora",
    "audio",
    "video",
    "speech",
    "embeds",
    "correctness",
    "sagemaker",
    "decisions",
)
"""Words in the paths of files that are about what Quire does not have."""

POOLING: dict[str, tuple[str, dict[str, Any]]] = {
    "intfloat/multilingual-e5-small": ("XLMRobertaModel", {}),
    "intfloat/e5-small": ("BertModel", {}),
    "BAAI/bge-base-en-v1.5": ("BertModel", {}),
    "BAAI/bge-m3": ("XLMRobertaModel", {}),
    "sentence-transformers/all-MiniLM-L12-v2": ("BertModel", {}),
    "Snowflake/snowflake-arctic-embed-m-v1.5": ("BertModel", {"matryoshka_dimensions": [16, 32]}),
    "BAAI/bge-reranker-base": ("XLMRobertaForSequenceClassification", {"num_labels": 1}),
    "cross-encoder/ms-marco-MiniLM-L-6-v2": ("BertForSequenceClassification", {"num_labels": 1}),
    "jason9693/Qwen2.5-1.5B-apeach": ("Qwen2ForSequenceClassification", {"num_labels": 2}),
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": ("Qwen3ForSequenceClassification", {"num_labels": 1}),
    "internlm/internlm2-1_8b-reward": ("Qwen2ForSequenceClassification", {"num_labels": 1}),
    "boltuix/NeuroBERT-NER": ("BertForTokenClassification", {"num_labels": 9}),
}
"""Architecture of a stand-in, and what differs from a tiny model's usual config."""

_OF_A_CHECKPOINT = """
    chat-template reasoning-parser dtype max-num-seqs gpu-memory-utilization tokenizer attention-backend
    max-num-batched-tokens load-format max-lora-rank max-cpu-loras max-loras tensor-parallel-size
"""
LEFT_OUT: dict[str, int] = {f"--{name}": 1 for name in _OF_A_CHECKPOINT.split()} | {
    "-tp": 1,
    "--enforce-eager": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
}
"""Flags that fit a checkpoint or a device of vLLM's, and how many words follow each."""

ALWAYS = ["--kv-cache-memory-bytes", "64M", "--max-num-seqs", "32", "--error-format", "vllm", "--metrics-names", "vllm"]
LONGEST = 4096
PATIENCE_S = 240.0


def install(names: dict[str, Any]) -> None:
    """From here on `import tests.utils` gives this file's server. `names`: what cases import of vLLM, by name."""
    from transformers import AutoTokenizer

    sys.meta_path.insert(0, _Finder())
    answers = ("Embedding", "Pooling", "Rerank", "Score", "Classification", "Error", "Tokenize", "Detokenize")
    names |= {f"{name}Response": Answer for name in answers}
    names |= {
        "hf_api": Hub,
        "current_platform": Platform(),
        "get_tokenizer": tokenizer_of,
        "cached_get_tokenizer": tokenizer_of,
    }
    AutoTokenizer.from_pretrained = staticmethod(tokenizer_of)  # type: ignore[method-assign]


def tokenizer_of(model: str | None = None, *_: Any, tokenizer_name: str | None = None, **__: Any) -> Any:
    """The tokenizer of a model's stand-in."""
    from transformers import PreTrainedTokenizerFast

    import quire

    folder = checkpoint(str(model or tokenizer_name)) or str(Path(quire.__path__[0]) / "assets/demo")
    return PreTrainedTokenizerFast.from_pretrained(folder)


@functools.cache
def checkpoint(model: str) -> str | None:
    """The folder that stands in for a model; None is the demo model."""
    if os.path.isdir(model):
        return model
    if model not in POOLING:
        return None
    architecture, config = POOLING[model]
    folder = f"{tempfile.mkdtemp()}/model"
    make = f"from tests.oracles.tiny_models import make_tiny_model as make; make({architecture!r}, {folder!r}, **{config!r})"
    # In this process `tests` is the distribution's package.
    subprocess.run([sys.executable, "-c", make], cwd=Path(__file__).parents[2], check=True)
    return folder


def flags_of(given: Sequence[Any], model: str) -> list[str]:
    """A case's flags without those that fit only vLLM's checkpoint."""
    words, flags = [str(word) for word in given], list[str]()
    if "--lora-modules" in words:  # an adapter's stand-in is the model under another name
        at = words.index("--lora-modules")
        end = next((index for index in range(at + 1, len(words)) if words[index].startswith("--")), len(words))
        flags += ["--served-model-name", model, *(word.partition("=")[0] for word in words[at + 1 : end])]
        del words[at:end]
    while words:
        name = words[0].partition("=")[0]
        too_long = name == "--max-model-len" and (model not in POOLING or int(words[1]) > 250)
        if name in LEFT_OUT or too_long:
            del words[: 1 if "=" in words[0] else 1 + LEFT_OUT.get(name, 1)]
        else:
            flags.append(words.pop(0))
    return flags


class RemoteServer:
    """`quire serve` in a process; what vLLM's `RemoteOpenAIServer` can be asked."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[Any],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        override_hf_configs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        del others
        Watch.num_read += 1
        flags = [*flags_of(vllm_serve_args, model), *ALWAYS, "--seed", str(seed or 0)]
        if "--served-model-name" not in flags:
            flags += ["--served-model-name", model]
        if model not in POOLING:
            flags += ["--max-model-len", str(LONGEST)]
        if override_hf_configs:
            flags += ["--hf-overrides", json.dumps(override_hf_configs)]
        self.uds = flags[flags.index("--uds") + 1] if "--uds" in flags else None
        if "--port" not in flags:
            with socket.create_server(("127.0.0.1", 0)) as free:
                flags += ["--port", str(free.getsockname()[1])]
        self.host, self.port, self.show_hidden_metrics = "127.0.0.1", int(flags[flags.index("--port") + 1]), False
        renamed = {name.replace("VLLM_", "QUIRE_"): value for name, value in (env_dict or {}).items()}
        command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve"]
        command += [folder] if (folder := checkpoint(model)) is not None else []
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, *flags], env=os.environ | renamed, stdout=self._log, stderr=subprocess.STDOUT, text=True
        )
        atexit.register(self._process.kill)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        log = Path(self._log.name)
        while " is ready after " not in log.read_text(encoding="utf-8"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8')[-800:]}")
            time.sleep(0.1)

    def __enter__(self) -> "RemoteServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()

    @property
    def url_root(self) -> str:
        """The address, without a path."""
        return f"http://{self.uds.rpartition('/')[2]}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """The address of a route."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _client(self, module: str, name: str, root: str, **options: Any) -> Any:
        options = {"timeout": 120, "max_retries": 0, "api_key": self.DUMMY_API_KEY} | options
        return getattr(__import__(module), name)(base_url=self.url_for(root), **options)

    def get_client(self, **options: Any) -> Any:
        """OpenAI's."""
        return self._client("openai", "OpenAI", "v1", **options)

    def get_async_client(self, **options: Any) -> Any:
        """OpenAI's, asynchronous."""
        return self._client("openai", "AsyncOpenAI", "v1", **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        """Anthropic's."""
        return self._client("anthropic", "Anthropic", "", **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        """Anthropic's, asynchronous."""
        return self._client("anthropic", "AsyncAnthropic", "", **options)


class Answer:
    """A JSON object with attributes, where cases validate answers with vLLM's classes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update({name: _with_attributes(value) for name, value in fields.items()})

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> "Answer":
        """Any object is valid."""
        return cls(fields)

    def model_dump(self, exclude: Sequence[str] = ()) -> dict[str, Any]:
        """The fields."""
        return {name: value for name, value in self.__dict__.items() if name not in exclude}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.__dict__ == other.__dict__


def _with_attributes(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_attributes(item) for item in value]
    return Answer(value) if isinstance(value, dict) else value


class Hub:
    """The hub's client, where cases fetch adapters."""

    def snapshot_download(self, **_: Any) -> str:
        """The folder of nothing."""
        return tempfile.gettempdir()


class Platform:
    """The platform of the machine: a CPU."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: name == "is_cpu"


def passed_on(*arguments: Any, **_: Any) -> Any:
    """A decorator, with options or without, that changes nothing."""
    return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else lambda function: function


# --- asynchronous fixtures and cases, in one loop ---

_LOOP = asyncio.new_event_loop()


def fixture(function: Any = None, **options: Any) -> Any:
    """`pytest_asyncio.fixture`."""
    if function is None:
        return lambda each: fixture(each, **options)
    options.pop("loop_scope", None)
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        def through_generator(*arguments: Any, **named: Any) -> Iterator[Any]:
            steps = function(*arguments, **named)
            yield _LOOP.run_until_complete(anext(steps))
            _LOOP.run_until_complete(steps.aclose())

        return pytest.fixture(**options)(through_generator)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        def through_coroutine(*arguments: Any, **named: Any) -> Any:
            return _LOOP.run_until_complete(function(*arguments, **named))

        return pytest.fixture(**options)(through_coroutine)
    return pytest.fixture(**options)(function)


def run_case(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """An asynchronous case."""
    _LOOP.run_until_complete(asyncio.wait_for(function(**arguments), 180))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname in ("tests.utils", "tests.conftest", "tests.models.utils", "pytest_asyncio", "pybase64"):
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return base64 if spec.name == "pybase64" else _Utils(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Utils(ModuleType):
    """Names are servers, lists of flags, decorators, or stand-ins."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name == "fixture":
            return fixture
        if name.startswith("Remote"):
            return RemoteServer
        if name.isupper():
            return {} if name.endswith("OVERRIDES") else []
        return internal(name) if name[0].isupper() else passed_on
