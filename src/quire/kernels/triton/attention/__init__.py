"""Attention over pages, and what comes before it: the kernels behind `kernels/attention.py` and `kernels/latent.py`."""
