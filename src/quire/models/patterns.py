"""Which layers see a window and which the whole context, as configs say it."""

from quire.config.hf_config import HFConfig


def sliding_layers(hf: HFConfig, every: int = 0) -> tuple[bool, ...]:
    """For each layer, whether it has a window: by `layer_types`, else every n-th layer is full.

    Args:
        every: n where the config gives none; 0 means that all layers are alike.
    """
    types = hf.get("layer_types")
    if types is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or every
    if isinstance(pattern, str):  # "LLLG": local and global layers, repeated
        return tuple(pattern[layer % len(pattern)] == "L" for layer in range(hf.num_hidden_layers))
    return tuple(not pattern or (layer + 1) % pattern != 0 for layer in range(hf.num_hidden_layers))
