"""How to pool: one pooling request's parameters."""

import msgspec


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Pooling parameters of one request; tasks are `embed`, `classify`, `token_embed`, `token_classify`."""

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
