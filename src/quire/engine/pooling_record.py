"""What the frontend remembers of a pooling request until it ends: its prompt, and what the pooler gave."""

import dataclasses

import numpy as np

from quire.engine.request_state import RequestRecord
from quire.outputs import PoolingOutput, PoolingRequestOutput


@dataclasses.dataclass(slots=True, eq=False)
class PoolingRecord(RequestRecord):
    """A pooling request: nothing is told of it before its end."""

    def build_output(self) -> PoolingRequestOutput[PoolingOutput] | None:
        """The pooled numbers; empty where the request was aborted or failed."""
        if self.num_unfinished or self.sequences[0].sent_finish:
            return None
        self.sequences[0].sent_finish = True
        values = np.zeros(0, np.float32) if self.pooled is None else self.pooled.to_array()
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(values),
            prompt_token_ids=self.prompt_token_ids,
            finished=True,
            num_cached_tokens=self.num_cached_tokens or 0,
            error=self.error,
        )
