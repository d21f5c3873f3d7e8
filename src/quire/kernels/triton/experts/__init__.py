"""Mixtures of experts: the kernels behind `kernels/experts.py`."""
