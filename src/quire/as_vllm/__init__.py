"""vLLM's package name, for programs that import it: `python -m quire.as_vllm script.py` runs them on Quire with no word changed.

`path/` holds a package `vllm`. A process that has this folder in PYTHONPATH, and so each of its children, imports it in place of
vLLM; its modules give Quire's names (`names.py` is the table). Nothing in Quire imports this folder.
"""
