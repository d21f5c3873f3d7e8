"""Tokenizers: text to token ids, conversations to prompts, and token ids back to text as they come."""
