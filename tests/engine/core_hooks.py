"""A hook that notes when it is called, and one that sends extras with every step; and a worker that answers with extras."""

from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.core.output import ModelRunnerOutput, SchedulerOutput, read_extra
from quire.engine.hooks import Core, CoreHooks
from quire.worker.worker import Worker


class Note(msgspec.Struct):
    """What travels with a step."""

    number: int
    words: list[str]


class NotingHooks(CoreHooks):
    """Notes what is called."""

    made: "list[NotingHooks]" = []

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.calls: list[Any] = []
        self.num_idle_calls = 3
        NotingHooks.made.append(self)

    def ready(self, core: Core) -> None:
        self.calls.append(("ready", core.kv_cache.num_blocks, core.stats().num_running))

    def before_schedule(self) -> None:
        self.calls.append("schedule")

    def planned(self, step: SchedulerOutput) -> None:
        self.calls.append(("planned", step.step_id))

    def after_step(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        assert output.step_id == step.step_id
        self.calls.append(("after", step.step_id))

    def idle(self) -> bool:
        self.num_idle_calls -= 1
        return self.num_idle_calls > 0

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class SendingHooks(CoreHooks):
    """Sends a note with every step, and keeps what the workers answer."""

    answers: list[Note] = []

    def planned(self, step: SchedulerOutput) -> None:
        step.extras["note"] = Note(step.step_id, ["from", "the", "core"])

    def after_step(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        answer = read_extra(output.extras, "answer", Note)
        assert answer is not None and read_extra(output.extras, "another", Note) is None
        SendingHooks.answers.append(answer)


class AnsweringWorker(Worker):
    """Answers a step's note."""

    def execute(self, step: SchedulerOutput) -> Any:
        note = read_extra(step.extras, "note", Note)
        assert note is not None
        output = super().execute(step)
        assert isinstance(output, ModelRunnerOutput)
        output.extras["answer"] = Note(2 * note.number, [*note.words, "answered"])
        return output
