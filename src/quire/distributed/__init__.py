"""Ranks that compute one model together: what they say to one another. Knows tensors; knows nothing of models."""
