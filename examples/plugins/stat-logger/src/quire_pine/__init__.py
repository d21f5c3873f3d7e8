"""A stat logger: a frontend tells it about steps, first tokens and ended requests."""

from quire.config import EngineConfig
from quire.engine.stat_loggers import StatLogger
from quire.logger import init_logger
from quire.metrics.engine_metrics import FinishedRequest

logger = init_logger("quire.pine")


class Logger(StatLogger):
    """Counts requests that ended, by their reasons, and logs every thousandth."""

    def __init__(self, config: EngineConfig) -> None:
        self.model = config.model.model
        self.ended: dict[str, int] = {}

    def record_finished(self, request: FinishedRequest) -> None:
        self.ended[request.finish_reason] = self.ended.get(request.finish_reason, 0) + 1
        if sum(self.ended.values()) % 1000 == 0:
            logger.info("%s: %s", self.model, self.ended)
