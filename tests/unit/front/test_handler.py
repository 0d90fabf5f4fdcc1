"""One request, one answer, one record, whatever happens on the way."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any, cast

import orjson
import pytest
import structlog

from gateway.config import Config
from gateway.core.backends.facts import ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import (
    BackendBusy,
    BodyTooLarge,
    Draining,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    QueueFull,
    RateLimited,
    RouteNotFound,
    StreamInterrupted,
    Unauthorized,
    UnsupportedEncoding,
)
from gateway.core.front.body import Upload
from gateway.core.front.connection import ClientConnection
from gateway.core.front.handler import Handler
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.reply import ClientResponse
from gateway.core.ledger import RequestLedger
from gateway.core.observe.record import Record
from gateway.core.request import InferenceRequest, Kind, UpstreamResult
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.routing.estimates import Estimates
from gateway.core.scheduling.fair_share import Backlog
from gateway.features.keys.limits import AllLimits
from gateway.features.keys.rate_limits import ApiKeys
from gateway.features.realtime.sessions import REALTIME, RealtimeSessions
from gateway.features.uploads.audio import UPLOADS, UploadForm, Uploads
from tests.routes import ALL_ROUTES
from tests.unit.front.readers import request_reader
from tests.unit.front.wires import Clock, FakeWire, Sent, fleet_of
from tests.unit.scheduling.virtual_time import run, turns

Story = Callable[[InferenceRequest, ClientResponse, Record], Awaitable[UpstreamResult]]
MULTIPART = {b"content-type": b'multipart/form-data; boundary="b"'}


async def well(request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
    """The backend `a` answers."""
    record.backend = "a"
    reply.send(200, b"application/json", b"", b'{"ok":true}')
    if request.on_opening is not None:
        request.on_opening("a", b'{"id":"resp_1"}')
    return UpstreamResult(200, None, 95.0)


def upload_of() -> Upload:
    return Upload(lambda _: None, Holding(MemoryBudget(10_000_000)))


class Scene:
    """A handler whose requests are answered by a story."""

    def __init__(self, story: Story = well, fleet: Fleet | None = None, **config: Any) -> None:
        self.story = story
        self.requests: list[InferenceRequest] = []
        self.completed: list[InferenceRequest] = []
        self.records: list[Record] = []
        whole = Config.model_validate({"backends": [BackendConfig(url="http://10.0.0.1:8000")]} | config)
        self.server_config = whole.server
        self.unix_clock = Clock(1_790_000_000.0)
        ledger = RequestLedger(Estimates(), self.records.append)
        sessions = RealtimeSessions(
            fleet or fleet_of(),
            self,
            new_id=lambda: "made-up",
            unix_seconds=lambda: 0.0,
            spend=ledger.spend,
            cors_origins=(),
        )
        uploads = Uploads(
            fleet or fleet_of(),
            self,
            backlog=Backlog(100, 10_000_000),
            max_wait_seconds=60.0,
            max_buffered_bytes=1_000_000,
            clock=Clock(),
        )
        self.handler = Handler(
            whole,
            fleet=fleet or fleet_of(),
            dispatchers=defaultdict(lambda: self, {UPLOADS: uploads, REALTIME: sessions}),
            reader=request_reader(whole),
            ledger=ledger,
            clock=Clock(),
            new_id=lambda: "made-up",
            complete=self.complete,
            random=Random(1),
            sources={"uploads": uploads, "realtime": sessions},
        )
        if whole.auth.keys:
            limits = AllLimits(Clock(), self.unix_clock)
            limits.apply(whole.auth.keys)
            ledger.apply(limits.by_name)
            self.handler.apply_keys(ApiKeys(whole.auth.keys, self.unix_clock).check)

    def admit(self, incoming: HttpRequest) -> bool:
        return incoming.admit(self.handler.check_key, self.server_config, ALL_ROUTES)

    async def complete(self, request: InferenceRequest) -> InferenceRequest:
        self.completed.append(request)
        return replace(request, document=None)

    async def dispatch(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        self.requests.append(request)
        return await self.story(request, reply, record)

    async def serve(self, sent: Sent | HttpRequest, wire: FakeWire | None = None) -> FakeWire:
        wire = wire or FakeWire()
        incoming = sent if isinstance(sent, HttpRequest) else sent.incoming()
        await self.handler.serve(incoming, cast(ClientConnection, wire))
        return wire

    def run(self, sent: Sent | HttpRequest) -> FakeWire:
        return run(self.serve(sent))

    @property
    def record(self) -> Record:
        assert len(self.records) == 1
        return self.records[0]


def test_a_request_that_is_answered_is_recorded_as_completed() -> None:
    scene = Scene()
    wire = scene.run(Sent())
    record = scene.record
    assert (wire.status, wire.body) == (200, b'{"ok":true}')
    assert (record.outcome, record.status, record.model, record.endpoint) == ("completed", 200, "m", "chat")
    assert (record.arrived_seconds, record.ended_seconds) == (90.0, 100.0)
    assert record.request_bytes == len(Sent().body)


def test_an_error_answer_that_says_something_of_the_request_is_recorded_as_refused() -> None:
    async def refuse(request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        reply.send(400, b"application/json", b"", b"{}")
        return UpstreamResult(400, None, None)

    scene = Scene(refuse)
    scene.run(Sent())
    assert (scene.record.outcome, scene.record.status) == ("refused_by_backend", 400)


@pytest.mark.parametrize(
    ("given", "used"),
    [(b"abc-1.2:x_Y", b"abc-1.2:x_Y"), (b"", b"made-up"), (b"a b", b"made-up"), (b"x" * 129, b"made-up"),
     (b"x\xff", b"made-up"), (b"a\tb", b"made-up")],
)  # fmt: skip
def test_a_sane_request_id_is_used_and_another_is_replaced(given: bytes, used: bytes) -> None:
    scene = Scene()
    wire = scene.run(Sent(headers={b"x-request-id": given}))
    assert wire.header(b"x-request-id") == used
    assert scene.requests[0].request_id == scene.record.request_id == used.decode()


def test_an_error_is_answered_and_recorded_by_its_outcome() -> None:
    async def refuse(request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        raise QueueFull("busy", retry_after_seconds=2.0)

    scene = Scene(refuse)
    wire = scene.run(Sent())
    assert wire.status == 429
    assert 2000 <= int(wire.header(b"retry-after-ms") or 0) <= 3000
    assert (scene.record.outcome, scene.record.status, scene.record.error) == ("queue_full", 429, "busy")


@pytest.mark.parametrize(("refusal", "spread"), [(QueueFull, True), (RateLimited, False)])
def test_the_retry_after_of_errors_that_come_in_bursts_is_jittered(refusal: type[GatewayError], spread: bool) -> None:
    async def refuse(request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        raise refusal("busy", retry_after_seconds=2.0)

    scene = Scene(refuse)
    waits_ms = [int(scene.run(Sent()).header(b"retry-after-ms") or 0) for _ in range(100)]
    assert (len(set(waits_ms)) > 50, min(waits_ms) >= 2000, max(waits_ms) > 2900) == (spread, True, spread)


def test_what_the_backend_said_is_passed_on_when_nothing_else_could_be_tried() -> None:
    async def busy(request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        error = BackendBusy("busy")
        error.answer = UpstreamResult(503, None, None, b'{"theirs":1}', b"application/json", b"retry-after: 9\r\n")
        raise error

    scene = Scene(busy)
    wire = scene.run(Sent())
    assert (wire.status, wire.body, wire.header(b"retry-after")) == (503, b'{"theirs":1}', b"9")
    assert scene.record.outcome == "backend_error"


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async def broken(request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        reply.begin(200, b"text/event-stream", b"")
        reply.write(b"data: 1\n\n")
        raise StreamInterrupted("broke off")

    scene = Scene(broken)
    wire = scene.run(Sent())
    assert b'"code":"stream_interrupted"' in wire.body
    assert (scene.record.outcome, scene.record.status) == ("interrupted", 200)


def test_a_fault_of_ours_is_answered_logged_and_recorded() -> None:
    async def crash(request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        raise ZeroDivisionError("secret detail")

    scene = Scene(crash)
    with structlog.testing.capture_logs() as logs:
        wire = scene.run(Sent())
    assert wire.status == 500
    assert orjson.loads(wire.body)["error"]["message"] == "Internal error of the gateway (ZeroDivisionError)."
    assert [(log["event"], log["endpoint"]) for log in logs] == [("internal_error", "chat")]
    assert scene.record.outcome == "internal_error"


@pytest.mark.parametrize(("was_cut", "outcome"), [(False, "client_gone"), (True, "cut_by_shutdown")])
def test_the_outcome_of_a_cut_request_names_the_cause(was_cut: bool, outcome: str) -> None:
    async def endless(request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        scene, wire = Scene(endless), FakeWire()
        task = asyncio.create_task(scene.serve(Sent(), wire))
        await turns(3)
        wire.was_cut = was_cut
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (scene.record.outcome, scene.record.status) == (outcome, 0)

    run(main())


def test_a_request_refused_while_it_was_read_is_answered_and_recorded() -> None:
    incoming = HttpRequest()
    incoming.error = BodyTooLarge("too large")
    scene = Scene()
    wire = scene.run(incoming)
    assert (wire.status, wire.header(b"connection")) == (413, b"close")
    assert (scene.record.endpoint, scene.record.outcome) == ("unknown", "rejected")


def test_a_configured_tenant_header_is_kept_and_names_the_tenant() -> None:
    scene = Scene(admission={"tenant_header": "X-User"})
    assert b"x-user" in scene.handler.known_headers
    scene.run(Sent(headers={b"x-user": b"ann", b"x-gateway-priority": b"batch"}))
    assert (scene.requests[0].demand.tenant, scene.requests[0].demand.batch) == ("ann", True)


def test_a_model_without_a_backend_is_recorded_as_unknown() -> None:
    scene = Scene()
    scene.run(Sent(body=b'{"model":"nonsense","messages":[]}'))
    assert scene.record.model == "unknown"


def test_local_answers_are_recorded_too() -> None:
    scene = Scene()
    wire = scene.run(Sent(b"/v1/models", b"", b"GET"))
    assert wire.status == 200
    assert (scene.record.endpoint, scene.record.outcome) == ("models", "completed")
    assert scene.requests == []


def test_while_draining_connections_are_not_kept() -> None:
    scene = Scene()
    scene.handler.start_draining()
    assert scene.run(Sent()).header(b"connection") == b"close"


def test_while_draining_it_is_not_ready() -> None:
    scene = Scene()
    scene.handler.start_draining()
    assert scene.run(Sent(b"/readyz", b"", b"GET")).status == Draining.status


def test_an_upload_is_passed_on_unread_once_its_model_is_known() -> None:
    async def main() -> None:
        scene = Scene(fleet=fleet_of(ModelCard("w"), ModelCard("v")))
        incoming = Sent(
            b"/v1/audio/transcriptions", b"", headers=MULTIPART | {b"x-gateway-priority": b"batch"}
        ).incoming()
        incoming.upload = upload_of()
        incoming.upload.feed(b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nw\r\n--b--')
        incoming.upload.end()
        await scene.serve(incoming)
        [request] = scene.requests
        assert (request.demand.model, request.kind, request.repeatable) == ("w", Kind.UPLOAD, False)
        assert isinstance(request.upload, UploadForm)
        assert request.upload.upload is incoming.upload
        assert request.demand.batch
        assert request.content_type == b"multipart/form-data; boundary=b"

    run(main())


@pytest.mark.parametrize(
    "content_type", [b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=a\r\nx: y"]
)
def test_an_upload_without_a_sane_boundary_is_refused(content_type: bytes) -> None:
    async def main() -> None:
        scene = Scene()
        incoming = Sent(b"/v1/audio/transcriptions", b"", headers={b"content-type": content_type}).incoming()
        incoming.upload = upload_of()
        incoming.upload.end()
        assert (await scene.serve(incoming)).status == 400
        assert scene.requests == []

    run(main())


def test_a_stored_response_is_looked_up_where_it_was_made_by_its_client_alone() -> None:
    async def main() -> None:
        keys = [{"name": name, "key": name} for name in ("ann", "bob")]
        scene = Scene(auth={"keys": keys})
        made = Sent(b"/v1/responses", b'{"model":"m","input":"x"}', headers={b"x-api-key": b"ann"}).incoming()
        scene.admit(made)
        await scene.serve(made)
        for name, status in (("ann", 200), ("bob", 404)):
            looked_up = Sent(b"/v1/responses/resp_1", b"", b"GET", {b"x-api-key": name.encode()}).incoming()
            scene.admit(looked_up)
            assert (await scene.serve(looked_up)).status == status
        request = scene.requests[-1]
        assert (request.method, request.target) == (b"GET", b"/v1/responses/resp_1")
        assert (request.demand.pinned, request.demand.sequences, request.demand.model) == ("a", 0, "m")
        assert [record.client for record in scene.records] == ["ann", "ann", "bob"]

    run(main())


# Heads, before their bodies are read.


def admit(sent: Sent, **config: Any) -> tuple[bool, HttpRequest]:
    incoming = HttpRequest()
    incoming.method, incoming.path, incoming.headers = sent.method, sent.path, dict(sent.headers)
    return Scene(**config).admit(incoming), incoming


def test_only_audio_is_streamed_and_has_a_limit_of_its_own() -> None:
    server = {"max_body_bytes": 10, "max_upload_bytes": 20}
    streamed, incoming = admit(Sent(), server=server)
    assert (streamed, incoming.max_body_bytes) == (False, 10)
    streamed, incoming = admit(Sent(b"/v1/audio/translations"), server=server)
    assert (streamed, incoming.max_body_bytes) == (True, 20)


@pytest.mark.parametrize("encoding", [b"", b"identity", b"Identity", b"utf-8", b"UTF-8"])
def test_what_is_no_encoding_is_accepted_as_vllm_does(encoding: bytes) -> None:
    assert admit(Sent(headers={b"content-encoding": encoding}))[1].route is not None


@pytest.mark.parametrize(("length", "accepted"), [(b"10", True), (b"11", False)])
def test_a_body_that_says_it_is_too_large_is_not_read(length: bytes, accepted: bool) -> None:
    sent = Sent(headers={b"content-length": length})
    if accepted:
        admit(sent, server={"max_body_bytes": 10})
    else:
        with pytest.raises(BodyTooLarge, match="limit of 10 bytes"):
            admit(sent, server={"max_body_bytes": 10})


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (Sent(b"/nowhere"), RouteNotFound),
        (Sent(method=b"GET"), MethodNotAllowed),
        (Sent(headers={b"content-encoding": b"gzip"}), UnsupportedEncoding),
    ],
)
def test_what_can_be_refused_by_its_head_is(sent: Sent, error: type[Exception]) -> None:
    with pytest.raises(error):
        admit(sent)


@pytest.mark.parametrize("headers", [{}, {b"authorization": b"Bearer anything"}])
def test_without_keys_every_request_is_allowed(headers: dict[bytes, bytes]) -> None:
    _, incoming = admit(Sent(headers=headers))
    assert incoming.key is None


def test_keys_are_checked_before_the_body_is_read_except_for_probes() -> None:
    auth = {"keys": [{"name": "ann", "key": "secret"}]}
    with pytest.raises(Unauthorized):
        admit(Sent(), auth=auth)
    with pytest.raises(Unauthorized):
        admit(Sent(b"/v1/models", method=b"GET"), auth=auth)
    _, incoming = admit(Sent(headers={b"authorization": b"Bearer secret"}), auth=auth)
    assert incoming.key is not None
    assert incoming.key.name == "ann"
    admit(Sent(b"/livez", method=b"GET"), auth=auth)


def test_an_invalid_body_never_reaches_a_backend() -> None:
    scene = Scene()
    assert scene.run(Sent(body=b"{")).status == InvalidRequest.status
    assert scene.requests == []
    assert scene.record.model == ""
