"""Checkpoints of NVIDIA's Model Optimizer: float8 with a scale a tensor, or NVFP4."""

import fnmatch

from quire.config.hf_config import HFConfig
from quire.quantization import fp4, fp8
from quire.quantization.scheme import Scheme, SchemeOf, is_within, refused


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `modelopt` stores each matrix.

    Raises:
        ConfigError: another algorithm than FP8 and NVFP4.
    """
    inner = section.get("quantization")
    values = inner if isinstance(inner, HFConfig) else section
    algorithm = str(values.get("quant_algo", "")).upper()
    if algorithm == "FP8":
        scheme = fp8.scaled(False, True)
    elif algorithm == "NVFP4":
        scheme = fp4.nvfp4("weight", "weight_scale_2", False)
    else:
        raise refused("quant_algo", values.get("quant_algo"), "FP8, NVFP4")
    excluded = [str(name) for name in values.get("exclude_modules") or values.get("ignore") or []]

    def scheme_of(source: str) -> Scheme | None:
        names = (source, f"model.{source}")
        is_plain = is_within(excluded, source) or any(
            fnmatch.fnmatchcase(name, pattern) for name in names for pattern in excluded
        )
        return None if source == "lm_head" or is_plain else scheme

    return scheme_of
