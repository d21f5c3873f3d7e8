"""Norms, activations and other operations on single rows: the kernels behind `kernels/norm.py`."""
