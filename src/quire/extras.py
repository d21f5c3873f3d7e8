"""Optional packages by the extra that names them, and the command that installs them.

A test compares the table with pyproject.toml. Messages name the packages, not this project's extra: whoever reads one has the
project already, and may have it from a folder.
"""

import importlib
import shlex
import sys
from typing import Any

from quire.errors import ConfigError

EXTRAS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers>=4.56", "sentencepiece>=0.2"),
    "client": ("openai>=1.60",),
    "ray": ("ray>=2.40",),
    "structured": ("llguidance>=1.9",),
    "xgrammar": ("xgrammar>=0.2",),
    "tiktoken": ("tiktoken>=0.7",),
    "mistral": ("mistral-common>=1.8",),
    "gguf": ("gguf>=0.17",),
    "flash": ("flash-attn-4>=4.0.0b36",),
    "flashinfer": ("flashinfer-python>=0.7.2",),
    "audio": ("soundfile>=0.13", "soxr>=0.5", "transformers>=4.56"),
    "nixl": ("nixl>=1",),
    "mooncake": ("mooncake-transfer-engine>=0.3.6",),
    "vision": ("pillow>=10", "transformers>=4.56", "torchvision>=0.26"),
    "video": ("av>=15",),
    "timm": ("timm>=1.0.16",),
    "otel": ("opentelemetry-sdk>=1.27", "opentelemetry-exporter-otlp>=1.27"),
}


def pip_install(*requirements: str) -> str:
    """The command that installs packages for the interpreter that runs."""
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def install_command(extra: str) -> str:
    """The command that installs an extra's packages."""
    return pip_install(*EXTRAS[extra])


def import_optional(module: str, extra: str, setting: str, why: str) -> Any:
    """A module of an optional package. Raises ConfigError: it cannot be imported; `why` says what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{why}: {install_command(extra)}", setting=setting) from error
