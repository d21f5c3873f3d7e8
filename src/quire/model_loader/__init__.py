"""Weights: found, checked, read in one pass."""

from quire.model_loader.loader import LoadedModel, load_model
from quire.model_loader.safetensors_reader import estimate_weight_bytes

__all__ = ["LoadedModel", "estimate_weight_bytes", "load_model"]
