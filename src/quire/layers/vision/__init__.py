"""Encoders of images: the layers of a decoder over patches, and what makes embeddings of their output."""
