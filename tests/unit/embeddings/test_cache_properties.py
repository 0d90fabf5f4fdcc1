"""Whatever clients ask and engines do: a cached embedding is that of the input."""

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import BackendError, BackendFault, ReusedConnectionClosed
from tests.unit.embeddings.scene import BAD, Scene, refusal, tokens, vector, vectors_in
from tests.unit.front.wires import FakeWire
from tests.unit.scheduling.virtual_time import run

_FAULTS = ("none", "none", "none", "none", "none", "reused", "fault", "short")


@dataclass(frozen=True)
class Client:
    """One request for some of a few texts, which others ask for, too."""

    after_ms: int
    texts: list[int]
    ids: bool
    encoding: str | None
    salt: str
    batch: bool
    deadline_ms: int | None
    leaves_after_ms: int | None

    def given(self) -> list[Any]:
        if self.ids:
            return [[number, 1] for number in self.texts]
        return [BAD if number == 13 else f"text {number}" + " w" * (number % 5) for number in self.texts]


CLIENTS = st.builds(
    Client,
    after_ms=st.integers(0, 60),
    texts=st.one_of(
        st.lists(st.integers(0, 12), min_size=1, max_size=1),
        st.lists(st.integers(0, 13), min_size=1, max_size=6),
        st.lists(st.integers(14, 60), min_size=1, max_size=80),
    ),
    ids=st.sampled_from((False, False, False, True)),
    encoding=st.sampled_from((None, "float", "base64")),
    salt=st.sampled_from(("", "", "ann")),
    batch=st.booleans(),
    deadline_ms=st.one_of(st.none(), st.integers(1, 40)),
    leaves_after_ms=st.one_of(st.none(), st.none(), st.integers(0, 40)),
)


class Engines:
    """Fail as planned, one request after the other."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, _backend: str, _items: list[Any]) -> BackendError | bytes | None:
        match self._names.pop(0) if self._names else "none":
            case "reused":
                return ReusedConnectionClosed("closed")
            case "fault":
                return BackendFault("broken")
            case "short":
                return orjson.dumps({"data": [], "usage": {"prompt_tokens": 1}})
        return None


async def one(scene: Scene, client: Client, number: int, lives: list[bytes]) -> tuple[FakeWire, int]:
    await asyncio.sleep(client.after_ms / 1000)
    born, deadline = len(lives) - 1, client.deadline_ms
    ask = scene.ask(
        client.given(), f"id-{number}", encoding=client.encoding, tenant=client.salt,
        fields={"cache_salt": client.salt} if client.salt else {},
        batch=client.batch, deadline_seconds=None if deadline is None else scene.clock() + deadline / 1000,
    )  # fmt: skip
    task = asyncio.create_task(ask)
    if client.leaves_after_ms is not None:
        asyncio.get_running_loop().call_later(client.leaves_after_ms / 1000, task.cancel)
    await asyncio.wait([task])
    return FakeWire() if task.cancelled() else task.result(), born


async def restarts(scene: Scene, after_ms: list[int], lives: list[bytes]) -> None:
    for wait in after_ms:
        await asyncio.sleep(wait / 1000)
        scene.weights = b"%d" % len(lives)
        lives.append(scene.weights)
        scene.restart("a")


def check(wire: FakeWire, client: Client, lives: list[bytes], *, faults: bool, cut: bool) -> None:
    """`lives` are the weights that the model has had since the client asked."""
    if not wire.sent:
        assert client.leaves_after_ms is not None
        return
    given = client.given()
    if wire.status == 400:
        assert wire.body == refusal(given) or cut  # then a piece was refused
    elif wire.status == 429:
        assert client.deadline_ms is not None
    elif wire.status != 200:
        assert faults, wire.body
    else:
        document = orjson.loads(wire.body)
        if faults and not document["data"]:
            return  # refused with others and then sent as it came: the engine's own wrong answer
        for item, found in zip(given, vectors_in(wire), strict=True):
            assert found in [vector(item, weights).tobytes() for weights in lives]
        assert all(isinstance(entry["embedding"], str) == (client.encoding == "base64") for entry in document["data"])
        if wire.header(b"x-gateway-usage") == b"exact":
            assert document["usage"]["prompt_tokens"] == sum(map(tokens, given))


@given(
    clients=st.lists(CLIENTS, min_size=1, max_size=24),
    faults=st.lists(st.sampled_from(_FAULTS), max_size=12),
    restarts_ms=st.lists(st.integers(0, 30), max_size=3),
    cache_bytes=st.sampled_from((0, 4_000, 1_000_000)),
    cap=st.sampled_from((4, 64)),
    counted=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_no_client_is_given_a_wrong_vector_an_old_one_or_another_clients_error(
    clients: list[Client],
    faults: list[str],
    restarts_ms: list[int],
    cache_bytes: int,
    cap: int,
    counted: bool,
) -> None:
    async def main() -> None:
        scene = Scene("ab", cap=cap, max_batch_items=16, cache_bytes=cache_bytes)
        scene.fault, scene.tokenizer.is_configured = Engines(list(faults)), counted
        lives = [scene.weights]
        restarting = asyncio.create_task(restarts(scene, restarts_ms, lives))
        wires = await asyncio.gather(*(one(scene, client, number, lives) for number, client in enumerate(clients)))
        await restarting
        for (wire, born), client in zip(wires, clients, strict=True):
            cut = not cache_bytes and len(client.texts) > cap
            check(wire, client, lives[born:], faults=any(fault != "none" for fault in faults), cut=cut)
        assert max(scene.most_at_once.values()) <= cap
        await scene.check_that_nothing_is_left()
        assert scene.cache.used_bytes <= cache_bytes

    run(main())
