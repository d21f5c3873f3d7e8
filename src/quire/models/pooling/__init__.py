"""Models that pool: their heads, and the layers below."""
