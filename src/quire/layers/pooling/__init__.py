"""The head of a model that gives vectors instead of tokens, and the layers below it."""
