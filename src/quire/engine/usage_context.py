"""Who asks for an engine: some defaults differ between a batch job, which wants throughput, and a server, which wants latency."""

import enum


class UsageContext(enum.StrEnum):
    """The user of an engine."""

    LLM_CLASS = "offline"
    API_SERVER = "server"
    ENGINE_CONTEXT = "engine"

    @property
    def column(self) -> int:
        """Which of a platform's (offline, server) defaults applies."""
        return 0 if self is UsageContext.LLM_CLASS else 1
