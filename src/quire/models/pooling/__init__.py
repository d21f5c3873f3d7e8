"""Models that pool: what stands on top of the layers, and which layers those are."""
