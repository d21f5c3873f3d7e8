"""The log's lines about requests: what they tell, and what they do not."""

import asyncio
import logging
from typing import Any

from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.sampling_params import SamplingParams

PROMPT = "My password is swordfish."


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def fields_of(**settings: Any) -> list[dict[str, Any]]:
    """The fields of the lines that one request makes."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=128, max_num_seqs=2, **settings))
    logger, kept = logging.getLogger("quire.engine.request_tracing"), Kept()
    logger.addHandler(kept)
    try:

        async def run() -> None:
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, stop=["swordfish and more"])
            async for _ in engine.generate(PROMPT, params, "request-1"):
                pass

        asyncio.run(run())
    finally:
        logger.removeHandler(kept)
        engine.shutdown()
    assert all("swordfish" not in record.getMessage() for record in kept.records) or settings.get("log_prompts")
    return [record.fields for record in kept.records]  # type: ignore[attr-defined]


def test_by_default_single_requests_leave_no_line():
    assert fields_of() == []


def test_lines_tell_figures_and_no_text_unless_asked():
    received, ended = fields_of(enable_log_requests=True, enable_log_outputs=True)
    assert received["event"] == "request_received" and received["request_id"] == "request-1"
    assert received["prompt_tokens"] > 0 and received["max_tokens"] == 4 and received["temperature"] == 0.0
    assert "prompt" not in received and "stop" not in received
    assert ended["event"] == "request_ended" and ended["finish_reason"] == "length" and ended["output_tokens"] == 4
    assert ended["total_s"] >= ended["first_token_s"] > 0 and "output" not in ended


def test_texts_come_when_asked_for_and_are_cut():
    received, ended = fields_of(enable_log_requests=True, enable_log_outputs=True, log_prompts=True, max_log_len=10)
    assert received["prompt"] == PROMPT[:10] and received["prompt_is_cut"]
    assert isinstance(ended["output"], str) and len(ended["output"]) <= 10


def test_each_kind_of_line_has_its_own_switch():
    assert [line["event"] for line in fields_of(enable_log_outputs=True)] == ["request_ended"]
