"""The server's routes of pooling models."""
