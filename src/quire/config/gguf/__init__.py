"""GGUF files: one file that holds a model's configuration, its tokenizer and its weights. Here all but the weights' bytes.

A file becomes a folder as checkpoints are (config.json, tokenizer.json …), so that no other part of Quire knows of GGUF.
"""
