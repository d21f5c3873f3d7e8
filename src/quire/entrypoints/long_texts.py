"""Texts that are longer than an embedding model reads: their pieces' vectors as one.

Where a text is cut is the pooling processor's to say (`PoolingProcessor.pieces`). Queues nothing.
"""

from collections.abc import Sequence

import numpy as np

from quire.outputs import PoolingOutput, PoolingRequestOutput

_UNIT = 1e-2
"""How far the length of a normalised vector may be from 1: half-precision numbers are rounded."""


def join(parts: Sequence[PoolingRequestOutput[PoolingOutput]]) -> PoolingRequestOutput[PoolingOutput]:
    """The mean of the pieces' vectors, weighted by their tokens; where each of them has length 1, so has the result."""
    if len(parts) == 1:
        return parts[0]
    vectors = np.stack([np.asarray(part.outputs.data, np.float32) for part in parts])
    weights = np.array([len(part.prompt_token_ids) for part in parts], np.float32)
    mean = (vectors * weights[:, None]).sum(axis=0) / weights.sum()
    are_unit = bool(np.all(np.abs(np.linalg.norm(vectors, axis=1) - 1.0) < _UNIT))
    length = float(np.linalg.norm(mean))
    first = parts[0]
    return PoolingRequestOutput(
        request_id=first.request_id,
        outputs=PoolingOutput(mean / length if are_unit and length else mean),
        prompt_token_ids=[token_id for part in parts for token_id in part.prompt_token_ids],
        finished=True,
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
        error=next((part.error for part in parts if part.error is not None), None),
    )
