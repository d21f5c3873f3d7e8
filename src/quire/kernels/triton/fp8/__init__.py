"""Products with float8 weights: the kernels behind `kernels/fp8.py`."""
