"""`import vllm` in a process that runs as vLLM: puts the modules of `quire.as_vllm` in the place of this file."""

from quire.as_vllm.modules import install

install()
