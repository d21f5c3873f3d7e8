"""Choosing tokens: the kernels behind `kernels/sampling.py`."""
