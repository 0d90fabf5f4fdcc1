"""Every hostile input: what the gateway is configured with, what is sent, and what is noted of the answer."""

import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from gateway.config import ServerConfig
from tests.bench.bounds import bodies, floods
from tests.bench.bounds.events import publish
from tests.bench.bounds.peer import Peer
from tests.bench.bounds.reload import reload_repeatedly, sections
from tests.bench.gateway_process import GatewayProcess

MEBIBYTE = 1048576
_WATCH_SECONDS = 5.0
_SMALL_BUFFER_BYTES = 4096


@dataclass
class Target:
    """The gateway under attack, its limits, and when the row must be done."""

    gateway: GatewayProcess
    limits: ServerConfig
    deadline: float
    engine_port: int
    events_port: int
    peers: list[Peer] = field(default_factory=list)

    def connect(self, receive_buffer_bytes: int = 0) -> Peer:
        """A connection that stays until the row is done."""
        peer = Peer(self.gateway.port, self.deadline, receive_buffer_bytes)
        self.peers.append(peer)
        return peer

    def ask(self, data: bytes, port: int | None = None) -> str:
        """One request: the status of its answer."""
        peer = Peer(port or self.gateway.port, self.deadline)
        self.peers.append(peer)
        peer.send(data)
        return peer.answer()

    @property
    def upstream_bytes(self) -> int:
        """What the engine has received since its start."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.engine_port}/received") as answer:
            return int(answer.read())

    def watch(self, seconds: float = _WATCH_SECONDS) -> None:
        """Leave things as they are for a while."""
        time.sleep(max(0.0, min(seconds, self.deadline - time.monotonic())))


@dataclass(frozen=True)
class Answered:
    """How it was answered; `held_seconds`: how long what it takes was held; `beyond`: at least so long."""

    how: str
    size_bytes: int = 0
    held_seconds: float | None = None
    beyond: bool = False


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    title: str
    attack: Callable[[Target], Answered]
    sections: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    flaps: bool = False
    reads_log: bool = True
    fleet: Callable[[int], dict[str, Any]] | None = None  # sections with backends on an engine at this port
    backends_up: bool = True  # they have to be, before it begins


def _one(build: Callable[[ServerConfig], bytes]) -> Callable[[Target], Answered]:
    def attack(target: Target) -> Answered:
        data = build(target.limits)
        return Answered(target.ask(data), len(data))

    return attack


def _told(statuses: list[str]) -> str:
    return ", ".join(f"{count} x {status}" if count > 1 else status for status, count in Counter(statuses).items())


def _nothing(target: Target) -> Answered:
    target.watch()
    return Answered("-")


def _flapping(target: Target) -> Answered:
    target.watch(2 * _WATCH_SECONDS)
    return Answered("-")


def _all(target: Target, requests: list[bytes]) -> Answered:
    peers = [target.connect() for _ in requests]
    for peer, data in zip(peers, requests, strict=True):
        peer.send(data)
    return Answered(_told([peer.answer() for peer in peers]), sum(map(len, requests)))


def _warm_rerank(target: Target, *headers: bytes) -> None:
    """The gateway learns how the model counts, so that what follows is cut into pieces."""
    for _ in range(3):
        target.ask(bodies.rerank(100, 2_000, *headers))


def _amplification(target: Target) -> Answered:
    _warm_rerank(target)
    data = bodies.rerank_amplification()
    before = target.upstream_bytes
    status = target.ask(data)
    return Answered(f"{status}, {(target.upstream_bytes - before) / len(data):,.1f} x its bytes upstream", len(data))


def _light_keys(target: Target) -> Answered:
    _warm_rerank(target, b"authorization: Bearer light0")
    return _all(target, [bodies.rerank(4, MEBIBYTE, b"authorization: Bearer light%d" % n) for n in range(2)])


def _tenants(target: Target) -> Answered:
    peers = [target.connect() for _ in range(4_000)]
    for number, peer in enumerate(peers):
        peer.send(bodies.chat("slow", user=str(number)).replace(b"host:", b"x-tenant: t%d\r\nhost:" % number, 1))
    target.watch()
    served = sum(1 for peer in peers if peer.has_answer)
    return Answered(f"{served} answered in {_WATCH_SECONDS:g} s")


def _huge_embeddings(target: Target) -> Answered:
    return _all(target, [bodies.embeddings("huge", ["a"]), bodies.embeddings("huge", ["b"])])


def _huge_rerank(target: Target) -> Answered:
    data = bodies.rerank(200, MEBIBYTE).replace(b'"fine"', b'"huge"')
    return Answered(target.ask(data), len(data))


def _absurd_usage(target: Target) -> Answered:
    answered = [target.ask(bodies.chat("absurd", user="absurd")) for _ in range(20)]
    target.watch(0.5)  # answers teach within a tenth of a second
    began = time.monotonic()
    after = _all(target, [bodies.chat("absurd") for _ in range(200)])
    took = time.monotonic() - began
    return Answered(f"{_told(answered)}; then 200 at once in {took:.1f} s: {after.how}")


def _kv_events(target: Target) -> Answered:
    return Answered("published", publish(target.events_port, min(_WATCH_SECONDS, target.deadline - time.monotonic())))


def _admin(path: bytes, build: Callable[[ServerConfig], bytes]) -> Callable[[Target], Answered]:
    def attack(target: Target) -> Answered:
        body = build(target.limits).split(b"\r\n\r\n", 1)[1]
        return Answered(target.ask(bodies.admin(path, body), target.gateway.admin_port), len(body))

    return attack


def _held(target: Target, peers: list[Peer], size_bytes: int) -> Answered:
    """How long connections that do nothing more are kept."""
    began = time.monotonic()
    ended = [peer.wait_for_end() for peer in peers]
    return Answered(
        _told([each or "held" for each in ended]), size_bytes, time.monotonic() - began, beyond=None in ended
    )


def _unfinished_bodies(path: bytes, method: bytes, share: float) -> Callable[[Target], Answered]:
    def attack(target: Target) -> Answered:
        size = target.limits.max_body_bytes
        data = bodies.unfinished(size, int(size * share), path, method)
        peers = [target.connect() for _ in range(40)]
        for peer in peers:
            peer.send(data)
        return _held(target, peers, len(data) * len(peers))

    return attack


def _slow_uploads(target: Target) -> Answered:
    data = bodies.upload_start(20 * MEBIBYTE, 100_000)
    for _ in range(8):
        target.connect().send(data)
    target.watch(0.5)
    began = time.monotonic()
    status = target.ask(bodies.chat())
    return Answered(f"chat: {status}", 8 * len(data), time.monotonic() - began, beyond=status == "no answer")


def _not_reading(target: Target) -> Answered:
    peers = [target.connect(_SMALL_BUFFER_BYTES) for _ in range(100)]
    for peer in peers:
        peer.push(bodies.chat("endless", stream=True), 1.0)
    began = time.monotonic()
    while time.monotonic() < target.deadline and any(peer.is_open for peer in peers):
        time.sleep(0.1)
    still = sum(peer.is_open for peer in peers)
    return Answered(f"{still} of 100 still open", 0, time.monotonic() - began, beyond=still > 0)


def _pipelining(target: Target) -> Answered:
    data = bodies.pipelined(MEBIBYTE)
    peers = [target.connect(_SMALL_BUFFER_BYTES) for _ in range(300)]
    for peer in peers:
        peer.push(data, 0.01)
    began = time.monotonic()
    while time.monotonic() < target.deadline and any(peer.is_open for peer in peers):
        time.sleep(0.1)
    still = sum(peer.is_open for peer in peers)
    return Answered(f"{still} of 300 still open", 0, time.monotonic() - began, beyond=still > 0)


_RELOADS = 6


def _reload(target: Target) -> Answered:
    gateway = target.gateway
    load, changes = reload_repeatedly(gateway.file, gateway.port, gateway.admin_port, target.engine_port, _RELOADS)
    return Answered(
        f"{len(changes)} reloads of {min(changes):,} changes; {load.failed} of {load.answered:,} requests failed",
        gateway.file.stat().st_size,
    )


_LISTED = 5_000
_WAIT_SECONDS = 20.0


def _listing(count: int) -> str:
    """So many backends that refuse connections."""
    return "".join(f"- url: http://127.1.{number // 250}.{number % 250 + 1}:9\n" for number in range(count)) or "[]"


def _discovering(engine_port: int) -> dict[str, Any]:
    file = Path(mkdtemp()) / "backends.yaml"
    file.write_text("[]")
    return {"backends": [{"url": f"http://127.0.0.1:{engine_port}"}], "discovery": {"file": str(file)}}


def _discovered(target: Target) -> Answered:
    """The list grows to thousands, and shrinks to one."""
    file, counts = Path(yaml.safe_load(target.gateway.file.read_text())["discovery"]["file"]), []
    for count in (_LISTED, 1):
        file.write_text(_listing(count))
        target.watch(_WAIT_SECONDS)
        names = target.gateway.metrics()
        counts.append(sum(name.startswith("gateway_backend_up{") for name in names))
    return Answered(f"{counts[0]:,} backends, then {counts[1]}")


def _flood(name: str) -> Callable[[Target], Answered]:
    def attack(target: Target) -> Answered:
        received = floods.read(target.gateway.port, floods.FLOODS[name])
        return Answered(f"{received / MEBIBYTE:.1f} MiB passed on", floods.FLOOD_BYTES)

    return attack


_ALIAS = {"models": {"aliases": {"alias": "fine"}}}
_LIGHT = {"auth": {"keys": [{"name": f"light{n}", "key": f"light{n}", "weight": 0.02} for n in range(2)]}}
_TENANTS = {"admission": {"tenant_header": "x-tenant"}}
_QUICK_PROBES = {"health": {"probe_interval_seconds": 0.02, "fall": 1, "rise": 1}}

CASES = (
    Case("nothing", "no other client at all", _nothing),
    Case("rerank-query", "rerank: query beyond ASCII, many documents", _one(bodies.rerank_query)),
    Case("rerank-amplification", "rerank: long query, 2,000 documents", _amplification),
    Case("brackets", "closing brackets", _one(bodies.brackets)),
    Case("alias-strings", "alias, beside a nested huge string", _one(bodies.alias_of_strings), _ALIAS),
    Case("alias-numbers", "alias, beside many numbers", _one(bodies.alias_of_numbers), _ALIAS),
    Case("form-lines", "upload: lines that almost name the model", _one(lambda _: bodies.form_lines())),
    Case("trailers", "chunked body, half of it trailers", _one(bodies.trailers)),
    Case("tiny-chunks", "body in chunks of 5 bytes", _one(bodies.tiny_chunks)),
    Case("floats", "array of long numbers", _one(bodies.floats)),
    Case("token-ids", "prompt of token ids", _one(bodies.token_ids)),
    Case("digits", "prompt of token ids of one digit", _one(bodies.digits)),
    Case("embeddings-digits", "embeddings of token ids of one digit", _one(bodies.embeddings_digits)),
    Case("nulls", "messages that are null", _one(bodies.nulls)),
    Case("parts", "one message of many parts, and an alias", _one(bodies.parts), _ALIAS),
    Case("keys", "an object of many keys", _one(bodies.keys)),
    Case("embeddings-ids", "embeddings of token ids", _one(bodies.embeddings_ids)),
    Case("long-text", "one message of the largest size", _one(bodies.long_text)),
    Case("strings", "many strings of escapes", _one(bodies.strings)),
    Case("backslashes", "string of backslashes", _one(bodies.backslashes)),
    Case("quotation-marks", "string of quotation marks", _one(bodies.quotation_marks)),
    Case("tool", "a tool's description of escapes", _one(bodies.tool_of_escapes)),
    Case("documents", "rerank: 60,000 documents", _one(lambda _: bodies.rerank(60_000, 7_000_000))),
    Case("session", "`prompt_cache_key` that is a list", _one(bodies.session)),
    Case("light-keys", "two keys of weight 0.02, 1 MB of documents each", _light_keys, _LIGHT, {"max_in_flight": 2}),
    Case("tenants", "4,000 waiting tenants", _tenants, _TENANTS, {"max_in_flight": 1}),
    Case("huge-embeddings", "answer of 400 MB to a shared batch", _huge_embeddings),
    Case("huge-rerank", "answer of 400 MB to a piece of a rerank", _huge_rerank),
    Case("absurd-usage", "usage of 10^12 tokens", _absurd_usage, {}, {"max_in_flight": 64}),
    Case("kv-events", "KV events of 15 MB in one message", _kv_events),
    Case(
        "admin-brackets",
        "/admin/route: closing brackets",
        _admin(b"/admin/route?path=/v1/chat/completions", bodies.brackets),
    ),
    Case("admin-numbers", "/admin/route: array of long numbers", _admin(b"/admin/route", bodies.floats)),
    Case("log-reader", "nobody reads standard error, a backend flaps", _flapping, _QUICK_PROBES, {}, True, False),
    Case("livez-bodies", "40 x GET /livez with a body, not finished", _unfinished_bodies(b"/livez", b"GET", 0.97)),
    Case("half-bodies", "40 x half a chat request", _unfinished_bodies(bodies.CHAT, b"POST", 0.5)),
    Case("slow-uploads", "8 uploads that rest, 8 slots", _slow_uploads, {}, {"max_in_flight": 8}),
    Case("not-reading", "100 clients that do not read a stream", _not_reading, {}, {"max_in_flight": 256}),
    Case(
        "reload",
        "reloads with 256 backends and 1,000 keys, under load",
        _reload,
        fleet=lambda engine_port: sections(engine_port, changed=False),
    ),
    Case("pipelining", "300 clients that pipeline and do not read", _pipelining),
    Case(
        "discovered",
        "5,000 backends that refuse are listed (1,024 are used), then one",
        _discovered,
        fleet=_discovering,
    ),
    *(
        Case(f"flood-{name}", f"backend: {name}", _flood(name), fleet=floods.flooded(name), backends_up=False)
        for name in floods.FLOODS
    ),
)
