"""Encoders of images as specs: what language models see with."""
