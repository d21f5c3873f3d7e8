"""Products with packed and int8 weights: the kernels behind `kernels/packed.py`."""
