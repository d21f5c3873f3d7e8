"""Each tenant's requests and tokens: a bounded number of rows, whatever names clients send."""

import msgspec

MOST_TENANTS = 64
"""Tenants with a row of their own: the first that come. All later ones share a row."""
OTHERS = "other"
NO_NAME = "default"
"""The row of requests without a tenant."""


class TenantFigures(msgspec.Struct):
    """A tenant's row.

    Attributes:
        requests: those that have ended, refused ones apart.
        prompt_tokens, generation_tokens: of requests that have ended.
        refused: requests for which there was no room.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    refused: int = 0

    def add(self, other: "TenantFigures") -> None:
        """Add another process's row of the same tenant."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class TenantTable:
    """The rows, by tenant."""

    def __init__(self) -> None:
        self.rows: dict[str, TenantFigures] = {}

    def row_of(self, tenant: str) -> TenantFigures:
        """A tenant's row, or the one that it shares with others."""
        name = tenant or NO_NAME
        if name not in self.rows and len(self.rows) >= MOST_TENANTS:
            name = OTHERS
        return self.rows.setdefault(name, TenantFigures())

    def add(self, others: dict[str, TenantFigures]) -> None:
        """Add another process's rows."""
        for name, row in others.items():
            self.row_of(name).add(row)
