"""The package's face: what `import quire` gives, and when."""

import subprocess
import sys

import pytest

import quire

PUBLIC = {
    "LLM", "LLMEngine", "LoRARequest", "AsyncLLMEngine", "AsyncLLM", "EngineArgs", "AsyncEngineArgs", "SamplingParams",
    "PoolingParams", "ModelRegistry", "PromptType", "TextPrompt", "TokensPrompt", "RequestOutput", "CompletionOutput",
    "PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput",
    "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput", "initialize_ray_cluster", "__version__",
    "__version_tuple__",
}  # fmt: skip
"""The names that users of the package know (the surface document, section 1)."""


def test_all_public_names_are_listed_in_all_and_in_dir() -> None:
    assert set(quire.__all__) == PUBLIC
    assert set(dir(quire)) >= PUBLIC


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'quire' has no attribute 'LLLM'"):
        _ = quire.LLLM  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(quire, name) is not None


def test_a_star_import_brings_every_name() -> None:
    code = "from quire import *\nprint(*globals())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) >= PUBLIC


def test_a_name_is_resolved_once() -> None:
    assert quire.SamplingParams is quire.SamplingParams
    assert "SamplingParams" in vars(quire)


def test_the_asynchronous_engine_has_two_names() -> None:
    assert quire.AsyncLLMEngine is quire.AsyncLLM


def test_asking_for_parameters_loads_no_torch() -> None:
    code = "import sys, quire; quire.SamplingParams(); quire.EngineArgs(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_version_and_its_tuple_agree() -> None:
    assert quire.__version__.split(".")[:3] == [str(part) for part in quire.__version_tuple__[:3]]


def test_ray_that_is_not_installed_is_named_with_its_extra() -> None:
    import importlib.util

    from quire.config import ParallelConfig
    from quire.errors import ConfigError

    if importlib.util.find_spec("ray") is not None:
        pytest.skip("Ray is installed here")
    with pytest.raises(ConfigError, match=r"'ray', which is not installed.*-m pip install 'ray"):
        quire.initialize_ray_cluster(ParallelConfig())
