"""Weights: found, checked, read in one pass."""

from quire.model_loader.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
