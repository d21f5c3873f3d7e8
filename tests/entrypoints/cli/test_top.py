"""`quire top`: figures between two looks at a server's metrics, and how they are shown."""

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.pty_terminal import Terminal

from quire.entrypoints.cli import top
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.top import ServerWatch, figures, read_metrics
from quire.errors import EngineError

FIGURES = {
    "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25, "prompt_tokens_total": 100,
    "generation_tokens_total": 50, "prefix_cache_queries_total": 80, "prefix_cache_hits_total": 20, "num_preemptions_total": 1,
}  # fmt: skip


def exposition(prefix: str = "quire:", labels: str = 'model_name="m"', **changes: float) -> str:
    lines = [f"{prefix}{name}{{{labels}}} {value}" for name, value in {**FIGURES, **changes}.items()]
    times = {"sum": changes.get("ttft_sum", 2.0), "count": changes.get("ttft_count", 4)}
    lines += [f"{prefix}time_to_first_token_seconds_{name}{{{labels}}} {value}" for name, value in times.items()]
    lines.append(f'{prefix}request_success_total{{finished_reason="stop",{labels}}} {changes.get("stops", 5)}')
    return "\n".join(lines) + "\n"


STATE = {
    "model": "shown", "version": "1", "uptime_s": 3661, "num_pages": 1000, "free_pages": 750,
    "step": {"id": 3, "ms": 4.0}, "steps": [
        {"id": 2, "ms": 9.0, "predicted_ms": 9.0, "num_tokens": 1}, {"id": 3, "ms": 4.0, "predicted_ms": 5.0, "num_tokens": 8},
    ],
    "requests": [
        {"id": "quick", "state": "decode", "prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 2, "total_s": 0.5},
        {"id": "slow", "state": "decode", "prompt_tokens": 5, "cached_tokens": 4, "output_tokens": 9, "total_s": 3.0},
    ], "finished": [],
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["quire:", "vllm:"])
def test_figures_are_what_happened_between_two_looks(prefix: str) -> None:
    before = read_metrics(exposition(prefix), 10.0)
    grown = {"prompt_tokens_total": 300.0, "generation_tokens_total": 90.0, "prefix_cache_queries_total": 280.0}
    later = exposition(prefix, **grown, prefix_cache_hits_total=120.0, ttft_sum=3.0, ttft_count=6, stops=9)
    shown = figures(before, read_metrics(later, 12.0))
    assert (shown["model"], shown["running"], shown["waiting"], shown["kv_usage"]) == ("m", 3, 2, 0.25)
    assert (shown["prompt_tokens_per_s"], shown["generation_tokens_per_s"]) == (100.0, 20.0)
    assert shown["prefix_hit_share"] == 0.5 and shown["prefix_hit_share_ever"] == 120 / 280
    assert shown["first_token_s"] == 0.5 and shown["inter_token_s"] is None
    assert shown["finished_per_s"] == {"stop": 2.0} and shown["preemptions"] == 0 and shown["requests"] == []


def test_figures_under_both_names_are_counted_once() -> None:
    assert read_metrics(exposition() + exposition("vllm:"), 0.0).metrics["num_requests_running"] == 3


def test_restarts_and_the_last_events_are_shown() -> None:
    sample = read_metrics(exposition(engine_restarts_total=2, request_deadlines_missed_total=1), 0.0)
    events = [{"at": number, "kind": "restart", "text": f"core {number}\x1b[2J", "count": 1} for number in range(7)]
    sample.state = {
        "events": [*events, {"at": 9, "kind": "refusal", "text": "full", "count": 1200}],
        "problem": "no core",
    }
    shown = figures(sample, sample)
    assert shown["happened"] == {"restarts": 2, "deadlines_missed": 1}
    lines = top.as_text(shown, "http://s", []).splitlines()
    assert any("2 restarts  1 deadlines missed" in line for line in lines) and any("no core" in line for line in lines)
    listed = lines[lines.index("what happened, latest first:") + 1 :]
    assert [line.split("  ", 1)[1] for line in listed] == [
        "refusal   full (1,200 times)",
        *(f"restart   core {number}[2J" for number in (6, 5, 4, 3)),
    ]


def test_engines_of_one_server_are_added_up() -> None:
    text = exposition(labels='engine="0",model_name="m"') + exposition(
        labels='engine="1",model_name="m"', kv_cache_usage_perc=0.75
    )
    sample = read_metrics(text, 0.0)
    names = ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds_sum")
    assert [sample.metrics[name] for name in names] == [6, 0.5, 4.0]
    assert sample.metrics["time_to_first_token_seconds_count"] == 8


def test_a_server_that_was_started_anew_gives_no_negative_rates() -> None:
    before = read_metrics(exposition(), 0.0)
    shown = figures(before, read_metrics(exposition(generation_tokens_total=1, ttft_count=0, ttft_sum=0), 1.0))
    assert shown["generation_tokens_per_s"] == 0.0 and shown["first_token_s"] is None


@pytest.mark.parametrize("text", ["", "other 1\n", "quire:num_requests_running{ 1\n"])
def test_what_is_not_our_metrics_is_one_error(text: str) -> None:
    with pytest.raises(EngineError, match="what /metrics gives"):
        read_metrics(text, 0.0)


def test_the_view_has_steps_and_the_longest_requests_first() -> None:
    before, now = read_metrics(exposition(), 0.0), read_metrics(exposition(), 1.0)
    before.state, now.state = {"steps": [{"id": 2}]}, STATE
    shown = figures(before, now)
    assert (shown["step_ms"], shown["step_predicted_ms"], shown["step_tokens"]) == (4.0, 5.0, 8.0)
    text = top.as_text(shown, "http://s", [0.0, 1.0, 8.0])
    assert text.startswith("shown at http://s  version 1  up 1:01:01")
    assert "25.0 %  250 of 1,000" in text and "3 running  2 waiting" in text and " ▁█" in text
    assert text.index("slow  ") < text.index("quick  ")
    assert "\x1b" not in text and "\x1b[1m" in top.as_text(shown, "http://s", [], styled=True)


def test_lines_are_cut_without_counting_styles() -> None:
    assert top.cut("abcdef", 3) == "abc"
    assert top.cut("\x1b[1mabc\x1b[0mdef", 4) == "\x1b[1mabc\x1b[0md"
    assert top.cut("\x1b[1mabc\x1b[0mdef", 2) == "\x1b[1mab\x1b[0m"


@pytest.fixture
def server() -> Iterator[Any]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server = self.server
            server.paths.append(self.path)  # type: ignore[attr-defined]
            status, text = server.pages.get(self.path, (404, "{}"))  # type: ignore[attr-defined]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.pages, made.paths = {"/metrics": (200, exposition())}, []  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{made.server_address[1]}"  # type: ignore[attr-defined]
    yield made
    made.shutdown()


def test_once_prints_one_view_and_json_is_one_line(server: Any, capsys: Any) -> None:
    assert main(["top", f"{server.url}/v1", "--once", "--interval", "0.05"]) == 0
    assert "3 running  2 waiting" in capsys.readouterr().out
    server.pages["/console/state"] = (200, json.dumps(STATE))
    assert main(["top", server.url, "--once", "--json", "--interval", "0.05"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == "shown" and shown["requests"][0]["id"] == "slow"


def test_a_server_without_a_console_is_not_asked_again(server: Any) -> None:
    watch = ServerWatch(server.url, None)
    watch.sample()
    watch.sample()
    assert server.paths.count("/metrics") == 2 and server.paths.count("/console/state") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["http://127.0.0.1:1"], "cannot reach"),
        (["--interval", "0"], "interval=0.0"),
        (["ftp://x"], "is not an address"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line(words: list[str], text: str, capsys: Any) -> None:
    assert main(["top", *words]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_the_screen_shows_again_after_an_outage_and_is_given_back(server: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "top", server.url, "--interval", "0.1"]
    terminal = Terminal(command)
    terminal.wait_for(top.ENTER)
    terminal.wait_for("3 running")
    server.pages["/metrics"] = (500, "broken")
    terminal.wait_for("trying again every 0.1 s")
    server.pages["/metrics"] = (200, exposition(num_requests_running=7))
    terminal.wait_for("7 running")
    terminal.type("q")
    terminal.wait_for(top.LEAVE)
    assert terminal.exit_code() == 0
