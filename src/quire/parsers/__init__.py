"""From what a model writes to what a client reads: reasoning, content and tool calls, while it is being written.

A format is data (`formats.py`), bodies of calls are read by `bodies.py`, and `stream.py` joins the two. Floor 2', no torch.
"""
