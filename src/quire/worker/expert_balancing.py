"""When a worker's experts are dealt anew (`--enable-eplb`): one layer between two steps, so that no step waits for all of them.

Every rank takes part in the same steps, so all come here at the same time. Knows steps; `layers/expert_balance.py` deals.
"""

from collections.abc import Sequence

from quire.config.engine import EplbConfig
from quire.layers.moe import Mixture
from quire.platforms.device import DeviceRuntime


class ExpertBalancing:
    """Counts steps, and balances the layers in turn.

    Args:
        mixtures: the worker's layers with experts.
    """

    def __init__(self, config: EplbConfig, mixtures: Sequence[Mixture], runtime: DeviceRuntime) -> None:
        self._config, self._mixtures, self._runtime = config, list(mixtures), runtime
        self._steps, self._loads = 0, list[list[int]]()

    def begin_step(self) -> None:
        """Before each step: experts may move."""
        behind, places = self._steps % self._config.step_interval, [mixture.places for mixture in self._mixtures]
        if self._steps and not behind:
            self._loads = [each.read_loads() for each in places if each is not None]
        if behind == self._config.step_interval - self._config.window_size:  # what is older does not count
            for each in places:
                assert each is not None
                each.forget_loads()
        self._steps += 1
        if self._loads:
            number = len(self._mixtures) - len(self._loads)
            self._runtime.synchronize()  # steps in flight read the weights that move
            name = f"mixture {number}" if self._config.log_balancedness else ""
            self._mixtures[number].balance(self._loads.pop(0), name)
            self._runtime.synchronize()
