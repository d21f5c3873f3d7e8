"""An IO processor (`--io-processor-plugin yew`): a list of names in, each one's nearest neighbour out."""

from collections.abc import Sequence
from typing import Any

from quire.engine.io_processor import IOProcessor, Pooled
from quire.inputs import PromptType
from quire.pooling_params import PoolingParams


class Processor(IOProcessor):
    """Embeds names, and tells for each which other one is the most alike."""

    def parse_data(self, data: Any) -> list[str]:
        names = data.get("names") if isinstance(data, dict) else None
        if not isinstance(names, list) or len(names) < 2 or not all(isinstance(name, str) and name for name in names):
            raise ValueError("it must have 'names', a list of at least two texts")
        return names

    def merge_pooling_params(self, params: PoolingParams | None) -> PoolingParams:
        return PoolingParams(task="embed")

    def pre_process(self, data: Any, request_id: str | None = None) -> Sequence[PromptType]:
        return list(data)

    def post_process(self, outputs: Sequence[Pooled], request_id: str | None = None) -> Any:
        vectors = [output.outputs.data for output in outputs]
        nearest: list[int] = []
        for index, vector in enumerate(vectors):
            others = [(float(vector @ other), at) for at, other in enumerate(vectors) if at != index]
            nearest.append(max(others)[1])
        return {"nearest": nearest}
