"""OpenAI's responses over the same preparation and parsers as chat completions, with a memory of past ones."""
