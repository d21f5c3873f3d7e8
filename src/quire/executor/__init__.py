"""Who runs the steps: one worker in this process now; other layouts by class path."""

from quire.executor.interface import Executor
from quire.executor.selector import executor_class, make_executor

__all__ = ["Executor", "executor_class", "make_executor"]
