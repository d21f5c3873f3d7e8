"""Drawn cases of every operation, and the oracles that they are compared with. Importing it draws nothing.

A plugin that declares operations of its own registers draws for them with `case.draw`.
"""

import importlib

DRAWN_IN = ("drawn_adapters", "drawn_codes", "drawn_experts", "drawn_pages", "drawn_rows", "drawn_sampling")
"""The modules that draw; those with the most to compile first."""


def load() -> None:
    """Register every draw of this package; again has no effect."""
    for module in DRAWN_IN:
        importlib.import_module(f"{__name__}.{module}")
