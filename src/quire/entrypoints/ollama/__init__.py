"""Ollama's protocol, for the programs that speak no other."""
