"""Quire: an engine that runs and serves large language models.

Importing the package costs a few milliseconds: it sets the process environment, and resolves every other name when it
is first used. No torch is loaded until something needs tensors.
"""

# The order of these two matters: the version stands alone, and the environment is set before anyone can import torch.
from quire.version import __version__, __version_tuple__  # isort: skip
import quire.env_override as _env_override  # isort: skip

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.adapters import LoRARequest
    from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from quire.engine.llm_engine import LLMEngine
    from quire.entrypoints.llm import LLM
    from quire.executor.ray import initialize_ray_cluster
    from quire.inputs import PromptType, TextPrompt, TokensPrompt
    from quire.models.registry import ModelRegistry
    from quire.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.pooling_params import PoolingParams
    from quire.sampling_params import SamplingParams

del _env_override

_WHERE = {
    "LLM": "quire.entrypoints.llm:LLM",
    "LoRARequest": "quire.adapters:LoRARequest",
    "LLMEngine": "quire.engine.llm_engine:LLMEngine",
    "AsyncLLMEngine": "quire.engine.async_llm:AsyncLLM",
    "AsyncLLM": "quire.engine.async_llm:AsyncLLM",
    "EngineArgs": "quire.engine.arg_utils:EngineArgs",
    "AsyncEngineArgs": "quire.engine.arg_utils:AsyncEngineArgs",
    "SamplingParams": "quire.sampling_params:SamplingParams",
    "PoolingParams": "quire.pooling_params:PoolingParams",
    "ModelRegistry": "quire.models.registry:ModelRegistry",
    "PromptType": "quire.inputs:PromptType",
    "TextPrompt": "quire.inputs:TextPrompt",
    "TokensPrompt": "quire.inputs:TokensPrompt",
    "RequestOutput": "quire.outputs:RequestOutput",
    "CompletionOutput": "quire.outputs:CompletionOutput",
    "PoolingOutput": "quire.outputs:PoolingOutput",
    "PoolingRequestOutput": "quire.outputs:PoolingRequestOutput",
    "EmbeddingOutput": "quire.outputs:EmbeddingOutput",
    "EmbeddingRequestOutput": "quire.outputs:EmbeddingRequestOutput",
    "ClassificationOutput": "quire.outputs:ClassificationOutput",
    "ClassificationRequestOutput": "quire.outputs:ClassificationRequestOutput",
    "ScoringOutput": "quire.outputs:ScoringOutput",
    "ScoringRequestOutput": "quire.outputs:ScoringRequestOutput",
    "initialize_ray_cluster": "quire.executor.ray:initialize_ray_cluster",
}
"""Every public name that is resolved on first access, as `module:attribute`."""

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "ModelRegistry",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
    "initialize_ray_cluster",
]


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    from quire.patch import bootstrap

    bootstrap("frontend", only_first=True)
    module, _, attribute = where.partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
