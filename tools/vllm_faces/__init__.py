"""What vLLM's own parser tests import, over Quire's parsers: `tools/vllm_cases.py` runs them so."""
