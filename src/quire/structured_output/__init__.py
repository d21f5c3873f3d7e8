"""Outputs of a wanted form: from a request's constraint to the tokens that may come next.

`grammar_text` writes a constraint as a grammar, `grammars` compiles grammars and follows rows through them. Knows token
ids and bytes. Knows nothing of tensors, logits, requests or steps.
"""
