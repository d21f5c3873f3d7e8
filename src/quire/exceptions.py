"""The errors under the names that programs written for vLLM import (`from quire.exceptions import VLLMValidationError`)."""

from quire.errors import EngineDeadError, EngineError, NotFoundError, QuireError, RequestError

VLLMError = QuireError
VLLMClientError = RequestError
VLLMValidationError = RequestError
"""Has `parameter` and `value`, too."""
VLLMNotFoundError = NotFoundError
VLLMServerError = EngineError
GenerationError = EngineError

__all__ = [
    "EngineDeadError",
    "GenerationError",
    "VLLMClientError",
    "VLLMError",
    "VLLMNotFoundError",
    "VLLMServerError",
    "VLLMValidationError",
]
