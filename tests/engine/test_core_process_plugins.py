"""A plugin reaches a core that runs as a process of its own."""

from types import SimpleNamespace
from typing import Any

from quire.engine import core_process
from quire.engine.messages import Start


def test_the_child_loads_general_plugins_as_a_core_before_it_builds_anything(monkeypatch) -> None:
    events: list[Any] = []

    class Core:
        def __init__(self, config: Any, executor: Any, **options: Any) -> None:
            events.append("built")

    monkeypatch.setattr(core_process, "load_general_plugins", lambda kind: events.append(kind))
    monkeypatch.setattr(core_process, "config_from_plain", lambda plain: SimpleNamespace(instance_id="x"))
    monkeypatch.setattr(core_process, "EngineCore", Core)
    monkeypatch.setattr(core_process, "settle_collector", lambda: None)
    inbox: Any = SimpleNamespace(receive=lambda block: [Start(config={})])
    assert core_process.start_core(inbox) is not None
    assert events == ["core", "built"]
