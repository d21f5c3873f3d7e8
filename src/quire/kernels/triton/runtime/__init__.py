"""Quire's way around Triton's own start and launches: compiled kernels on disk, compilers beside the start, a driver without a C
compiler, launches without bookkeeping.

Kernels know nothing of this room, and it knows no kernel. `door.py` is the one place where Triton is changed.
"""
