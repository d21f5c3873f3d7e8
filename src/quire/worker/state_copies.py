"""Hidden states of requests' tokens, for files: the half in a worker of the connector `hidden_states`.

The model leaves copies of its residual before some layers with each step; those of a step whose tokens are wanted are copied to
the host behind its layers, and given to the scheduler's half with the step's result. Knows nothing of requests.
"""

import collections
from typing import Any

import torch

from quire.config import EngineConfig
from quire.config.kv_transfer import SETTING
from quire.core.state_files import States
from quire.errors import ConfigError
from quire.layers.decoder import Decoder
from quire.layers.interface import CausalLM
from quire.platforms.interface import DeviceRuntime
from quire.worker.page_connector import KVConnectorWorker

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class StateCopies(KVConnectorWorker):
    """Raises ConfigError: the model pools, its layers or prompts are divided, or it does not have these layers."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime) -> None:
        super().__init__(config, runtime)
        assert config.kv_transfer is not None
        self._layers, parallel = sorted(set(config.kv_transfer.hidden_states().layers or ())), config.parallel
        if config.model.pooling is not None:
            raise _refusal("a pooling model gives its states away itself: use the task token_embed")
        if parallel.pipeline_parallel_size * parallel.prefill_context_parallel_size > 1:
            raise _refusal(
                "no rank has all states with pipeline_parallel_size or prefill_context_parallel_size above 1"
            )
        self._copied: collections.deque[tuple[int, torch.Tensor]] = collections.deque()

    def see_model(self, model: CausalLM) -> None:
        if not isinstance(model, Decoder) or model.spec.hyper is not None:
            raise _refusal("this model has no single stream of hidden states")
        if self._layers[-1] > model.spec.layers:
            raise _refusal(
                f"layers={self._layers}: the model has {model.spec.layers} layers, give 0 to {model.spec.layers}"
            )
        self._handed = model.hand_out(self._layers, is_normed=False)

    def bind_connector_metadata(self, meta: Any) -> None:
        self._step_id, self._num_tokens = meta

    def wait_for_save(self) -> None:
        if self.config.parallel.rank:  # all ranks have the same
            return
        states_TLD = torch.stack([each_TD[: self._num_tokens] for each_TD in self._handed], dim=1)
        host = self.runtime.host_empty(states_TLD.shape, states_TLD.dtype).copy_(states_TLD, non_blocking=True)
        self._copied.append((self._step_id, host))

    def get_finished(self, step_id: int) -> States | None:
        while self._copied and self._copied[0][0] <= step_id:
            copied_id, host = self._copied.popleft()
            if copied_id == step_id:  # an earlier step was lost
                data = host.view(torch.uint8).numpy().tobytes()
                return States(step_id, _DTYPES[host.dtype], list(host.shape), data)
        return None


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"{SETTING}.kv_connector='hidden_states' cannot be used: {why}", setting=SETTING)
