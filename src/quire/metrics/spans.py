"""Requests as OpenTelemetry spans: names and attributes are vLLM's, so that views made for it work.

Spans are sent by a thread of OpenTelemetry's own, in batches. Knows what a span is made of; knows nothing of engines. Needs the
extra `otel`.
"""

import contextvars
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError
from quire.extras import install_command

TRACE_HEADERS: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar("trace_headers", default=None)
"""The W3C headers (`traceparent`, `tracestate`) of the HTTP request that is being served."""

_FLUSH_S = 3.0
"""How long an ending server waits for the last spans to be taken."""


@dataclasses.dataclass
class RequestSpan:
    """One request that has ended. Times are nanoseconds since 1970.

    Attributes:
        attributes: by name; None leaves one out.
        events: time, name, attributes.
        error: why it failed, if it did.
    """

    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[int, str, dict[str, Any]]]
    parent: Mapping[str, str] | None = None
    error: str | None = None


class SpanWriter:
    """Writes spans to a collector.

    Args:
        endpoint: the collector's address; its protocol is `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`'s (grpc, or http/protobuf).
        exporter: takes the spans instead, in tests.

    Raises:
        ConfigError: OpenTelemetry is not installed, or its protocol is unknown.
    """

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise _not_installed(error) from None
        resource = Resource.create()  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "quire"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _make_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("quire.llm_engine")
        self._propagator = TraceContextTextMapPropagator()

    def write(self, span: RequestSpan) -> None:
        """Hand a span over; returns at once."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        context = self._propagator.extract(span.parent) if span.parent else None
        attributes = {name: value for name, value in span.attributes.items() if value is not None}
        started = self._tracer.start_span("llm_request", context, SpanKind.SERVER, attributes, start_time=span.begin_ns)
        for at, name, attributes in span.events:
            started.add_event(name, attributes, timestamp=at)
        if span.error is not None:
            started.set_status(Status(StatusCode.ERROR, span.error))
        started.end(end_time=span.end_ns)

    def shutdown(self) -> None:
        """Send what is left, for a few seconds at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        f"otlp_traces_endpoint needs OpenTelemetry, which is not installed ({error}): {install_command('otel')}",
        setting="otlp_traces_endpoint",
    )


def _make_exporter(endpoint: str) -> Any:
    from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL

    from quire import envs

    protocol = envs.foreign(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or envs.foreign(OTEL_EXPORTER_OTLP_PROTOCOL) or "grpc"
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        elif protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        else:
            message = f"{OTEL_EXPORTER_OTLP_TRACES_PROTOCOL} is {protocol!r}; it may be grpc or http/protobuf"
            raise ConfigError(message, setting="otlp_traces_endpoint")
    except ImportError as error:
        raise _not_installed(error) from None
    return OTLPSpanExporter(endpoint=endpoint)
