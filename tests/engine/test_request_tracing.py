"""Spans of requests: what they hold, whose trace they belong to, and that a real collector gets them."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from quire.engine import async_llm as async_llm_module
from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.errors import ConfigError
from quire.metrics.spans import RequestSpan, SpanWriter

SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2}
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def spans_of(
    monkeypatch: pytest.MonkeyPatch, requests: list[tuple[dict[str, Any], dict[str, str]]]
) -> list[ReadableSpan]:
    """The spans of completions, asked for one after another: body and headers."""
    kept = Kept()
    monkeypatch.setattr(async_llm_module, "SpanWriter", lambda endpoint: SpanWriter(endpoint, kept))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(otlp_traces_endpoint="http://127.0.0.1:1", **SETTINGS))

    async def run() -> None:
        assert await engine.is_tracing_enabled()
        transport = httpx.ASGITransport(build_app(ServerState(ServerSettings(), engine)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            for body, headers in requests:
                await client.post(
                    "/v1/completions", json={"max_tokens": 4, "ignore_eos": True, **body}, headers=headers
                )
        await asyncio.sleep(0)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()
    return kept.spans


def test_a_span_has_the_names_of_vllm_the_callers_trace_and_the_timeline(monkeypatch):
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "X-Request-Id": "mine"}
    first, second = spans_of(
        monkeypatch, [({"prompt": "one two", "temperature": 0.5}, headers), ({"prompt": "x", "n": 2}, {})]
    )
    assert first.name == "llm_request" and f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == "b7ad6b7169203331" and second.parent is None
    told = dict(first.attributes)
    assert told["gen_ai.usage.completion_tokens"] == 4 and told["gen_ai.usage.prompt_tokens"] > 0
    assert told["gen_ai.request.temperature"] == 0.5 and told["gen_ai.request.max_tokens"] == 4
    assert "mine" in told["gen_ai.request.id"] and told["gen_ai.response.finish_reasons"] == ("length",)
    latency = {name.rsplit(".", 1)[1]: value for name, value in told.items() if ".latency." in name}
    assert 0 <= latency["time_in_queue"] <= latency["time_to_first_token"] <= latency["e2e"]
    parts = latency["time_in_queue"] + latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    assert parts == pytest.approx(latency["e2e"])
    assert [event.name for event in first.events][:3] == ["queued", "scheduled", "chunk"]
    assert all(first.start_time <= event.timestamp <= first.end_time for event in first.events)
    assert told["quire.prefix.why"] in ("never seen", "shorter than a page")
    assert second.attributes["gen_ai.usage.num_sequences"] == 2
    assert second.attributes["gen_ai.usage.completion_tokens"] == 8


def test_without_an_endpoint_nothing_is_traced():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS))
    try:
        assert not asyncio.run(engine.is_tracing_enabled())
    finally:
        engine.shutdown()


def test_a_failed_request_is_marked_so():
    kept = Kept()
    writer = SpanWriter("http://127.0.0.1:1", kept)
    writer.write(RequestSpan(1, 2, {"a": None, "b": 1}, [], error="it broke"))
    writer.shutdown()
    (span,) = kept.spans
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "it broke"
    assert dict(span.attributes) == {"b": 1} and (span.start_time, span.end_time) == (1, 2)
    assert span.resource.attributes["service.name"] == "quire"


def test_a_collector_gets_spans_over_http(monkeypatch):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
        writer = SpanWriter(f"http://127.0.0.1:{server.server_port}/v1/traces")
        writer.write(RequestSpan(10, 20, {"gen_ai.request.id": "r"}, [(15, "queued", {"requests_in_queue": 0})]))
        writer.shutdown()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    request = ExportTraceServiceRequest.FromString(bodies[0])
    (spans,) = request.resource_spans
    assert "my-service" in str(spans.resource)
    (span,) = spans.scope_spans[0].spans
    assert (span.name, span.start_time_unix_nano, span.events[0].name) == ("llm_request", 10, "queued")


def test_an_unknown_protocol_is_an_error_that_names_the_known_ones(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="grpc or http/protobuf"):
        SpanWriter("http://127.0.0.1:1")
