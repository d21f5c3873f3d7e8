"""When a worker's experts are dealt anew (`--enable-eplb`): one layer between two steps, so that no step waits for all of them.

Every rank takes part in the same steps, so all come here at the same time. Knows steps; `layers/expert_balance.py` deals.
"""

from collections.abc import Sequence

from quire.config.eplb import EplbConfig
from quire.layers.moe import Mixture
from quire.platforms.device import DeviceRuntime


class ExpertBalancing:
    """Counts steps, and balances the layers in turn.

    Args:
        mixtures: the worker's layers with experts.
    """

    def __init__(self, config: EplbConfig, mixtures: Sequence[Mixture], runtime: DeviceRuntime) -> None:
        self._config, self._mixtures, self._runtime = config, list(mixtures), runtime
        self._steps, self._next = 0, len(self._mixtures)

    def begin_step(self) -> None:
        """Before each step: experts may move."""
        behind = self._steps % self._config.step_interval
        if self._steps and not behind:
            self._next = 0
        if behind == self._config.step_interval - self._config.window_size:  # what is older does not count
            for places in (mixture.places for mixture in self._mixtures):
                assert places is not None
                places.forget_loads()
        self._steps += 1
        if self._next < len(self._mixtures):
            self._runtime.synchronize()  # steps in flight read the weights that move
            name = f"mixture {self._next}" if self._config.log_balancedness else ""
            self._mixtures[self._next].balance(name)
            self._runtime.synchronize()
            self._next += 1
