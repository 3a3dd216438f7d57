"""OpenTelemetry traces: a trace for each attempt at a round, with a span for each participant."""

from __future__ import annotations

import logging
from typing import Any

from isthmus import __version__
from isthmus.errors import StorageError
from isthmus_server.observability.sinks import EventSink
from isthmus_server.storage.events import Event, RoundAttemptFailed, RoundCommitted
from isthmus_server.storage.records import EndedAttempt, FailedAttempt, Receipt

_EXPORT_SECONDS = 10.0
"""Time for the collector to take the spans of a round, repetitions included."""


class TraceSink(EventSink):
    """Sends a trace of each ended attempt of one run to an OTLP collector, over HTTP.

    The root span is the attempt; its children are the work of its participants, from the start of
    the attempt for as long as each reports that it worked. A datacenter's span has the figures of
    its ranks. Spans name participants, as the report does.
    """

    name = "otel"
    hang_seconds = 60.0

    def __init__(self, job: str, run_id: str, endpoint: str | None) -> None:
        """Prepare; libraries are imported with the first attempt, in the sink's thread.

        Args:
            job: the job's name.
            run_id: the run.
            endpoint: URL of the collector's `/v1/traces`; None for that of the environment,
                `OTEL_EXPORTER_OTLP_ENDPOINT` or http://localhost:4318.
        """
        self._job = job
        self._run_id = run_id
        self._endpoint = endpoint
        self._tracer: Any = None
        self._ended: Any = None
        self._exporter: Any = None

    def __call__(self, event: Event) -> None:
        """Send the trace of an ended attempt."""
        if isinstance(event, RoundCommitted | RoundAttemptFailed):
            if self._tracer is None:
                self._begin()
            self._trace(event.record)

    def close(self) -> None:
        """Close the connection to the collector."""
        if self._exporter is not None:
            self._exporter.shutdown()

    def _begin(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        # It would log each failure; there is one warning of the sink.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        about = {"service.name": "isthmus", "service.version": __version__}
        provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._ended = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = provider.get_tracer("isthmus_server", __version__)
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint, timeout=_EXPORT_SECONDS)

    def _trace(self, record: EndedAttempt) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        begin = _nanoseconds(record.started_at)
        root = self._tracer.start_span(
            f"round {record.round}",
            start_time=begin,
            attributes={
                "isthmus.job": self._job,
                "isthmus.run": self._run_id,
                "isthmus.round": record.round,
                "isthmus.attempt": record.attempt,
                "isthmus.regime": record.regime,
                "isthmus.reason": record.reason,
                "isthmus.cost": record.cost.price,
                **{f"isthmus.metrics.{name}": value for name, value in record.metrics.items()},
            },
        )
        if isinstance(record, FailedAttempt):
            root.set_status(Status(StatusCode.ERROR, record.error))
        inside = set_span_in_context(root)
        for receipt in record.receipts:
            span = self._tracer.start_span(
                "datacenter" if receipt.regime == "datacenter" else "device",
                context=inside,
                start_time=begin,
                attributes=_about(receipt, record),
            )
            if receipt.status != "accepted":
                span.set_status(Status(StatusCode.ERROR, receipt.reason))
            span.end(end_time=_nanoseconds(record.started_at + receipt.seconds))
        root.end(end_time=_nanoseconds(record.started_at + record.seconds))
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise StorageError("the collector of traces did not take them")


def _about(receipt: Receipt, record: EndedAttempt) -> dict[str, str | int | float]:
    """Attributes of a participant's span."""
    profile = getattr(record, "profile", {}).get(receipt.participant, {})
    return {
        "isthmus.participant": receipt.participant,
        "isthmus.outcome": receipt.outcome,
        "isthmus.reason": receipt.reason,
        "isthmus.examples": receipt.examples,
        "isthmus.steps": receipt.steps,
        "isthmus.bytes_in": receipt.moved.up,
        "isthmus.bytes_out": receipt.moved.down,
        **{f"isthmus.ranks.{name}": value for name, value in profile.items()},
    }


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
