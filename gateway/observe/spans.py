"""The spans of a finished request, by OpenTelemetry's semantic conventions. It needs the extra `otel`.

A request is a server span. Below it, each attempt has a span of its placement (with one of its time in the queue) and
a client span, whose id the backend got: engines that trace requests make theirs below it.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway.observe.record import Record
from gateway.observe.trace import Attempt, RequestTrace

_NANOSECONDS = 1_000_000_000
_OPERATIONS = {
    "chat": "chat",
    "chat_batch": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
    "embed": "embeddings",
}  # of the conventions for generative AI; others have the endpoint's name
_GOOD = ("completed", "refused_by_backend")  # outcomes that are not the gateway's or a backend's failure
_CLIENTS_FAULT = ("rejected", "rate_limited", "refused_by_backend")


class _Resource(Resource):
    """A resource whose hash is computed once; exporters need it for every span."""

    def __hash__(self) -> int:
        return self._known_hash

    @cached_property
    def _known_hash(self) -> int:
        return super().__hash__()


class Spans:
    """Makes the spans of requests. `new_ids` is that of `Tracer`."""

    def __init__(self, service_name: str, version: str, new_ids: Callable[[], bytes]) -> None:
        found = Resource.create({"service.name": service_name, "service.version": version})
        self._resource = _Resource(found.attributes, found.schema_url)
        self._scope = InstrumentationScope("vllm-batching-gateway", version)
        self._new_ids = new_ids

    def of(
        self, record: Record, trace: RequestTrace, urls: dict[str, str], offset_seconds: float
    ) -> list[ReadableSpan]:
        """All spans of a request, its own first. `offset_seconds`: from the loop's clock to Unix time; `urls`: of
        backends, by name.
        """
        request = _Request(self, record, trace, offset_seconds)
        attempts = trace.attempts
        if not attempts and record.backend:  # it was sent in batches or in pieces
            whole = trace.stand_in()
            whole.backend, whole.placed_seconds = record.backend, record.arrived_seconds
            whole.first_byte_seconds, whole.ended_seconds = record.first_byte_seconds, record.ended_seconds
            return [request.server(), request.client(whole, 0, urls)]
        spans = [request.server()]
        for number, attempt in enumerate(attempts):
            spans += request.placement(attempt)
            if attempt.placed_seconds is not None:
                spans.append(request.client(attempt, number, urls))
        return spans

    def span(
        self, name: str, ids: tuple[str, str, str], attributes: dict[str, Any], start: int, end: int, **more: Any
    ) -> ReadableSpan:
        """One span; `ids`: its trace, its own, and its parent's or nothing."""
        trace_id, span_id, parent_id = ids
        is_remote = more.get("kind") is SpanKind.SERVER
        return ReadableSpan(
            name,
            context=_context(trace_id, span_id, is_remote=False),
            parent=_context(trace_id, parent_id, is_remote=is_remote) if parent_id else None,
            resource=self._resource,
            attributes={key: value for key, value in attributes.items() if value not in (None, "")},
            start_time=start,
            end_time=max(start, end),
            instrumentation_scope=self._scope,
            **more,
        )

    def new_span_id(self) -> str:
        return self._new_ids()[32:].decode()


class _Request:
    """One request, on its way to spans."""

    def __init__(self, spans: Spans, record: Record, trace: RequestTrace, offset_seconds: float) -> None:
        self._spans, self._record, self._trace = spans, record, trace
        self._offset_seconds = offset_seconds
        self._operation = _OPERATIONS.get(record.endpoint, record.endpoint)

    def server(self) -> ReadableSpan:
        """The request as its client sees it."""
        record, trace = self._record, self._trace
        is_failure = record.outcome not in _GOOD and record.outcome not in _CLIENTS_FAULT
        attributes = {
            "http.request.method": trace.method,
            "http.response.status_code": record.status or None,
            "url.path": trace.path,
            "error.type": record.outcome if is_failure else None,
            "gen_ai.operation.name": self._operation,
            "gen_ai.request.model": record.model,
            "gateway.request_id": record.request_id,
            "gateway.outcome": record.outcome,
            "gateway.client": record.client,
            "gateway.attempts": record.attempts if record.attempts > 1 else None,
        }
        status = Status(StatusCode.ERROR, record.error or record.outcome) if is_failure else Status()
        ids = (trace.trace_id, trace.span_id, trace.parent_id)
        times = self._nanoseconds(record.arrived_seconds), self._nanoseconds(record.ended_seconds)
        name = f"{trace.method} {trace.path}" if record.endpoint != "unknown" else trace.method
        return self._spans.span(name, ids, attributes, *times, kind=SpanKind.SERVER, status=status)

    def placement(self, attempt: Attempt) -> list[ReadableSpan]:
        """The search for an engine with the prices of the best ones, and below it the time in the queue."""
        record, trace, prices = self._record, self._trace, attempt.prices
        was_placed = attempt.placed_seconds is not None
        until = attempt.placed_seconds if attempt.placed_seconds is not None else record.ended_seconds
        attributes = {
            "gateway.backend": attempt.backend,
            "gateway.predicted_hit_tokens": attempt.hit_tokens if was_placed else None,
            "gateway.engines": [
                f"{price.engine};cost={price.cost:.4g};hit={price.hit_tokens};open={int(price.is_open)}"
                for price in prices
            ]
            or None,
        }
        span_id = self._spans.new_span_id()
        times = self._nanoseconds(attempt.asked_seconds), self._nanoseconds(until)
        status = Status() if was_placed else Status(StatusCode.ERROR, record.outcome)
        ids = (trace.trace_id, span_id, trace.span_id)
        spans = [self._spans.span("placement", ids, attributes, *times, status=status)]
        waited = attempt.waited_seconds if was_placed else until - attempt.asked_seconds
        if waited > 0:
            ids = (trace.trace_id, self._spans.new_span_id(), span_id)
            attributes = {"gateway.class": "batch" if record.batch else "interactive", "gateway.model": record.model}
            spans.append(self._spans.span("queue", ids, attributes, self._nanoseconds(until - waited), times[1]))
        return spans

    def client(self, attempt: Attempt, number: int, urls: dict[str, str]) -> ReadableSpan:
        """The request to a backend, from its first byte to the answer's last one."""
        record, trace, url = self._record, self._trace, urlsplit(urls.get(attempt.backend, ""))
        is_last = number == max(0, len(trace.attempts) - 1)
        error = attempt.error or (record.outcome if is_last and record.outcome not in _GOOD else "")
        first, ended = attempt.first_byte_seconds, attempt.ended_seconds
        placed = attempt.placed_seconds if attempt.placed_seconds is not None else record.arrived_seconds
        answered = is_last and not error
        attributes = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": record.model,
            "gen_ai.request.stream": record.streams or None,
            "gen_ai.usage.input_tokens": record.prompt_tokens or None if answered else None,
            "gen_ai.usage.output_tokens": record.completion_tokens or None if answered else None,
            "gen_ai.usage.cache_read.input_tokens": record.actual_hit_tokens if answered else None,
            "gen_ai.response.time_to_first_chunk": first - placed if first is not None and record.streams else None,
            "server.address": url.hostname,
            "server.port": url.port,
            "http.request.resend_count": number or None,
            "error.type": error,
            "gateway.backend": attempt.backend,
        }
        events = [Event("first_token", timestamp=self._nanoseconds(first))] if first is not None else []
        times = self._nanoseconds(placed), self._nanoseconds(ended if ended is not None else record.ended_seconds)
        status = Status(StatusCode.ERROR, record.error if is_last and record.error else error) if error else Status()
        ids = (trace.trace_id, attempt.span_id, trace.span_id)
        name = f"{self._operation} {record.model}".rstrip()
        return self._spans.span(name, ids, attributes, *times, kind=SpanKind.CLIENT, status=status, events=events)

    def _nanoseconds(self, seconds: float) -> int:
        """Unix time of a moment of the loop's clock."""
        return int((self._offset_seconds + seconds) * _NANOSECONDS)


def _context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))
