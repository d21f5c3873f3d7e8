"""The architecture as a table: a Llama under another name."""

from quire.config.hf_config import HFConfig
from quire.models.llama import llama
from quire.models.spec import DecoderSpec


def acorn(hf: HFConfig) -> DecoderSpec:
    """What differs from Llama is changed here, for example `.with_attention(qkv_bias=True)`."""
    return llama(hf)
