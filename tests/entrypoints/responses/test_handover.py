"""A server that ends leaves its background responses to the next one, and clients notice nothing but a pause."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.demo_server import DemoServer

from quire.entrypoints.cli.main import main

NUM_TOKENS = 500
SAMPLED = {"max_output_tokens": NUM_TOKENS, "temperature": 0.9, "extra_body": {"ignore_eos": True, "seed": 11}}
NUM_RESPONSES = 6


def asked(number: int) -> dict[str, Any]:
    body = {"model": "quire-demo", "input": f"Count from {number} to 90.", **SAMPLED}
    return body | {"temperature": 0.0} if number == 0 else body


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_background_responses_go_on_in_the_next_server_with_the_tokens_that_they_would_have_had(tmp_path: Path) -> None:
    folder, store = tmp_path / "left", tmp_path / "responses.sqlite"
    flags = ("--responses-store", str(store), "--handover", str(folder), "--shutdown-timeout", "0")
    first = DemoServer(*flags)
    client = first.openai()
    silent = [client.responses.create(background=True, **asked(number)) for number in range(1, NUM_RESPONSES)]
    stream = client.responses.create(background=True, stream=True, **asked(0))
    events = [next(stream) for _ in range(8)]
    first.popen.send_signal(signal.SIGTERM)
    events += list(stream)
    code, output = first.end()
    assert code == 0, output
    response_id = events[0].response.id
    left = {file.name.split(".")[0] for file in folder.iterdir()}
    assert response_id in left and events[-1].type == "response.output_text.delta"
    last = events[-1].sequence_number

    second = DemoServer(*flags)
    try:
        client = second.openai()
        events += list(client.responses.retrieve(response_id, stream=True, starting_after=last))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        final = events[-1].response
        assert (events[-1].type, final.id, final.usage.output_tokens) == (
            "response.incomplete",
            response_id,
            NUM_TOKENS,
        )
        whole = client.responses.create(**asked(0))
        assert text_of(events) == final.output_text == whole.output_text
        with ThreadPoolExecutor() as pool:  # asked together, they are answered in one batch
            others = list(pool.map(lambda number: client.responses.create(**asked(number)), range(1, NUM_RESPONSES)))
        for response, other in zip(silent, others, strict=True):
            while response.status in ("queued", "in_progress"):
                response = client.responses.retrieve(response.id)
            assert response.status == "incomplete" and response.usage is not None
            assert response.usage.output_tokens == NUM_TOKENS
            assert response.output_text == other.output_text
        headers = {"Last-Event-ID": str(last)}
        again = second.client.get(f"/v1/responses/{response_id}?stream=true", headers=headers).text
        numbers = [json.loads(line[6:])["sequence_number"] for line in again.splitlines() if line.startswith("data: ")]
        assert numbers == list(range(last + 1, len(events)))
        assert not list(folder.iterdir())
        told = second.client.get("/console/state").json()
        assert told["event_totals"]["handover"] == NUM_RESPONSES
        assert any("goes on here behind its" in event["text"] for event in told["events"])
    finally:
        assert second.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "needs --responses-store"),
        (("--responses-store", "x.sqlite", "--api-server-count", "2"), "needs one API server"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(flags, why, capfd):
    assert main(["serve", "--port", "0", "--handover", "left", *flags]) != 0
    assert why in capfd.readouterr().err
