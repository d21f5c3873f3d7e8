"""At load, of a model that sees through Transformers' modules: one drawn image goes the whole way of an item, so that a model
whose images are more than embeddings is refused before a request has one.
"""

import numpy as np

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.layers.interface import CausalLM
from quire.layers.tower import TowerDecoder
from quire.layers.transformers_backend import TransformersModel
from quire.layers.vision.borrowed_tower import BorrowedTower
from quire.media import IMAGE
from quire.multimodal.checkpoint_processors import whole_processor
from quire.multimodal.image_families import FAMILIES
from quire.multimodal.whole_processor import whole_family

HEIGHT, WIDTH = 48, 80


def check_drawn_image(model: CausalLM, config: EngineConfig) -> None:
    """Raises ConfigError: the model's images are more than embeddings, or its processor cannot be read."""
    tower = model.towers.get(IMAGE) if isinstance(model, TowerDecoder | TransformersModel) else None
    if not isinstance(tower, BorrowedTower) or config.multimodal is None or config.model.architecture in FAMILIES:
        return
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    try:
        processor = whole_processor(config.model.path)
        given = processor(pixels, **config.multimodal.mm_processor_kwargs)
        arrays = {name: values[0] for name, values in given.items()}
        item = whole_family(processor).expand(config.model.hf_config, arrays, lambda text: [])
    except Exception as error:  # whatever a processor raises
        message = f"the model's processor cannot be used: {error}. With language_model_only it reads text"
        raise ConfigError(message, setting="model") from error
    tower.check(item.arrays)
