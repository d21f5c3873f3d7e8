"""Adds the attention backend `elm` (`--attention-backend elm`). It is named by its path: importing it imports torch."""


def register() -> None:
    """Quire calls this in each of its processes."""
    from quire.attention.selector import register_attention_backend

    register_attention_backend("elm", "quire_elm.backend:ElmBackend")
