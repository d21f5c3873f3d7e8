"""Products with plain weights, and embeddings: the kernels behind `kernels/linear.py`."""
