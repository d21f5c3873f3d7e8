"""Adds an implementation of the operation `rms_norm`. It is imported in workers only: it imports torch."""


def register(process_kind: str) -> None:
    """Quire calls this once for each kind that a process is of."""
    if process_kind in ("worker", "inspector"):
        import quire_fir.kernels  # noqa: F401  (registers at import)
