"""Metrics: what the engine's steps and finished requests add up to, for Prometheus and for the log."""
