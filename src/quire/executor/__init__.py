"""Executors run the steps: on a worker in this process, on a process a device, or by a class of the user's own."""

from quire.executor.interface import Executor
from quire.executor.selector import executor_class, make_executor

__all__ = ["Executor", "executor_class", "make_executor"]
