"""Encoders beside a decoder: what they read, and the decoder whose layers attend to that."""
