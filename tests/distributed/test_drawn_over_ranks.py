"""Drawn configs over two processes that sum through gloo: what one process gives, where the sizes can be shared at all."""

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.test_models_over_ranks import check, restored_choice
from tests.distributed.test_recurrent_over_ranks import FirstOfTwo
from tests.models.drawn_configs import draw_config
from tests.models.test_drawn_configs import NO_MODEL, architectures, make_oracle
from tests.oracles.model_driver import build_tiny
from tests.oracles.tiny_models import make_tiny_model

from quire.errors import ConfigError
from quire.kernels import ops

__all__ = ["restored_choice"]

DRAWS = 24
WANTED = 2
"""Models of each architecture, of so many draws."""
TOLERANCE = 5e-4


def drawn(architecture: str, folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Some draws that are models and can be shared by two ranks."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for seed in range(100, 100 + DRAWS):
        overrides = draw_config(architecture, seed)
        try:
            path = make_tiny_model(architecture, folder / f"{architecture}{seed}", tokenizer=False, **overrides)
            build_tiny(path, communicator=FirstOfTwo())
        except (ConfigError, *NO_MODEL):
            continue
        if make_oracle(path) is not None:
            found[f"{architecture} {seed}"] = (architecture, overrides)
        if len(found) == WANTED:
            break
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(6))
def test_two_ranks_compute_what_one_computes_of_drawn_configs(part, tmp_path: Path) -> None:
    ops.select("any")
    models = {name: model for each in architectures()[part::6] for name, model in drawn(each, tmp_path).items()}
    assert len(models) > 15
    check(2, tmp_path, models, "native", tolerance=TOLERANCE)
