"""Whatever clients ask and engines do: each client gets its own vectors, its own error, or nothing if it left."""

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import BackendError, BackendFault, FreshConnectionClosed, ReusedConnectionClosed
from gateway.core.request import UpstreamResult
from tests.unit.embeddings.scene import BAD, Scene, expected, refusal, tokens, vectors_in
from tests.unit.front.wires import FakeWire
from tests.unit.scheduling.virtual_time import run

_FAULTS = ("none", "none", "none", "none", "none", "none", "reused", "fresh", "fault", "short")


@dataclass(frozen=True)
class Client:
    """One request."""

    after_ms: int
    items: int
    as_one: bool
    ids: bool
    bad: bool
    encoding: str | None
    tenant: str
    batch: bool
    leaves_after_ms: int | None

    def given(self, number: int) -> Any:
        made: list[Any] = [
            [number, place, 1] if self.ids else f"text {number} {place} " + "w " * (place % 5)
            for place in range(self.items)
        ]
        if self.bad and not self.ids:
            made[-1] = BAD
        return made[0] if self.as_one and self.items == 1 else made


CLIENTS = st.builds(
    Client,
    after_ms=st.integers(0, 30),
    items=st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 200)),
    as_one=st.booleans(),
    ids=st.booleans(),
    bad=st.sampled_from((False, False, False, False, True)),
    encoding=st.sampled_from((None, "float", "base64")),
    tenant=st.sampled_from(("", "ann", "bob")),
    batch=st.booleans(),
    leaves_after_ms=st.one_of(st.none(), st.none(), st.integers(0, 40)),
)


class Faults:
    """Engines fail as planned, one request after the other."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, _backend: str, items: list[Any]) -> BackendError | bytes | None:
        match self._names.pop(0) if self._names else "none":
            case "reused":
                return ReusedConnectionClosed("closed")
            case "fresh":
                return FreshConnectionClosed("gone")
            case "fault":
                error = BackendFault("broken")
                error.answer = UpstreamResult(500, None, None, body=b'{"error":{}}', content_type=b"application/json")
                return error
            case "short":
                return orjson.dumps({"data": [], "usage": {"prompt_tokens": 1}})
        return None


async def one(scene: Scene, client: Client, number: int) -> FakeWire:
    await asyncio.sleep(client.after_ms / 1000)
    ask = scene.ask(
        client.given(number), f"id-{number}", encoding=client.encoding, tenant=client.tenant, batch=client.batch
    )
    task = asyncio.create_task(ask)
    if client.leaves_after_ms is not None:
        asyncio.get_running_loop().call_later(client.leaves_after_ms / 1000, task.cancel)
    await asyncio.wait([task])
    return FakeWire() if task.cancelled() else task.result()


def check(wire: FakeWire, client: Client, number: int, *, piece: int, faults: bool) -> None:
    if not wire.sent:
        assert client.leaves_after_ms is not None
        return
    given = client.given(number)
    items = given if isinstance(given, list) and not (client.ids and client.as_one and client.items == 1) else [given]
    if wire.status != 200:
        own = BAD in items and wire.status == 400
        assert own or faults, wire.body
        if own and len(items) <= piece:  # of a list that was cut, the piece is refused
            assert wire.body == refusal(items)
        return
    document = orjson.loads(wire.body)
    assert BAD not in items
    if faults and not document["data"]:
        assert client.encoding == "base64"  # sent alone and as it came: the engine's own answer, right or wrong
        return
    assert vectors_in(wire) == expected(items)
    assert document["id"] == f"embd-id-{number}" or wire.header(b"x-gateway-usage") == b"exact"
    wanted_floats = client.encoding != "base64"
    assert all(isinstance(entry["embedding"], list) == wanted_floats for entry in document["data"])
    if wire.header(b"x-gateway-usage") == b"exact":
        assert document["usage"]["prompt_tokens"] == sum(map(tokens, items))


@given(
    st.lists(CLIENTS, min_size=1, max_size=24),
    st.lists(st.sampled_from(_FAULTS), max_size=20),
    st.sampled_from(("a", "ab", "abc")),
    st.sampled_from((4, 16, 64)),
)
@settings(max_examples=150, deadline=None)
def test_no_vector_ever_reaches_the_wrong_client(
    clients: list[Client], faults: list[str], backends: str, cap: int
) -> None:
    async def main() -> None:
        scene = Scene(backends, cap=cap, max_batch_items=16)
        scene.fault = Faults(list(faults))
        wires = await asyncio.gather(*(one(scene, client, number) for number, client in enumerate(clients)))
        for number, (wire, client) in enumerate(zip(wires, clients, strict=True)):
            check(wire, client, number, piece=min(16, cap), faults=any(fault != "none" for fault in faults))
        assert max(scene.most_at_once.values()) <= cap
        await scene.check_that_nothing_is_left()

    run(main())


@given(st.lists(st.integers(1, 12), min_size=2, max_size=24))
@settings(max_examples=50, deadline=None)
def test_shared_usage_adds_up_to_what_engines_counted(lengths: list[int]) -> None:
    async def main() -> None:
        scene = Scene()
        given = [[f"text {number} " + "w " * (place % 7) for place in range(n)] for number, n in enumerate(lengths)]
        wires = await scene.ask_all(*given)
        reported = sum(orjson.loads(wire.body)["usage"]["prompt_tokens"] for wire in wires)
        assert reported == sum(tokens(item) for items in given for item in items)

    run(main())
