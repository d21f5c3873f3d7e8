"""Structured output: from a request's constraint to the tokens that may come next.

`grammar_text` writes a constraint as a grammar; `grammars` compiles and keeps them, after `trial` has tried them in another
process; `rows` follows rows through them; `backend` is what a grammar engine must be able to do, `guidance` and
`xgrammar_backend` are two. Knows token ids and bytes. Knows nothing of tensors, logits, requests or steps.
"""
