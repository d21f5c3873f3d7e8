"""A plugin reaches a core that runs as a process of its own."""

from types import SimpleNamespace
from typing import Any

from quire.engine import core_loop
from quire.engine.messages import Ready, Start


def test_the_child_loads_general_plugins_as_a_core_before_it_builds_anything(monkeypatch) -> None:
    events: list[Any] = []

    class Core:
        def __init__(self, config: Any, executor: Any, **options: Any) -> None:
            events.append("built")

        def ready(self) -> Ready:
            return Ready(8, 16, 256)

    monkeypatch.setattr(core_loop, "load_general_plugins", lambda kind: events.append(kind))
    monkeypatch.setattr(core_loop, "config_from_plain", lambda plain: SimpleNamespace(instance_id="x"))
    monkeypatch.setattr(core_loop, "EngineCore", Core)
    monkeypatch.setattr(core_loop, "gc", SimpleNamespace(collect=int, freeze=int, set_threshold=print))
    process = core_loop.CoreProcess.__new__(core_loop.CoreProcess)
    process._inbox = SimpleNamespace(receive=lambda block: [Start(config={})])  # type: ignore[assignment]
    process._send = lambda message: events.append(type(message).__name__)  # type: ignore[method-assign]
    process._start()
    assert events == ["core", "built", "Ready"]
