"""Anthropic's messages over the same preparation and parsers as chat completions."""
