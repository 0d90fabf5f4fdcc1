"""The form of an audio upload: which model it names, and what of it the backend gets."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser

from gateway.config import Config
from gateway.core.backends.facts import ModelCard
from gateway.core.errors import GatewayError, InvalidRequest, MemoryFull, ModelNotAllowed, ModelNotFound
from gateway.core.front.body import Upload
from gateway.core.front.connection import ClientConnection
from gateway.core.front.http_request import HttpRequest
from gateway.core.request import InferenceRequest, ModelChoice
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.scheduling.fair_share import Backlog
from gateway.features.uploads.audio import Uploads
from tests.routes import find_route
from tests.unit.front.clients import Scene as Host
from tests.unit.front.clients import echo
from tests.unit.front.readers import request_reader
from tests.unit.front.wires import Clock, FakeWire, fleet_of, reply_on
from tests.unit.scheduling.virtual_time import run, turns

FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n%b\r\n'
END = b"--b--\r\n"
BUFFERED = 3_000_000
BEYOND = 4_000_000


def field(value: bytes, name: bytes = b"model") -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name, value)


def form(*models: bytes, size: int = 4, first: bool = True) -> bytes:
    fields = b"".join(map(field, models))
    file = FILE % bytes(size)
    return (fields + file if first else file + fields) + END


def cut(whole: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(len(whole) - min(each, len(whole)) for each in cuts), len(whole)]
    return [whole[start:end] for start, end in pairwise(edges) if end > start]


class Scene:
    """Uploads to a fleet of these models."""

    def __init__(self, *served: str, budget_bytes: int = 1 << 30, **key: Any) -> None:
        keys = [{"name": "ann", "key": "ann", **key}] if key else []
        self.config = Config.model_validate(
            {
                "backends": [{"url": "http://10.0.0.1:8000"}],
                "models": {"aliases": {"whisper-1": "whisper", "other-1": "other"}},
                "auth": {"keys": keys},
            }
        )
        self.budget = MemoryBudget(budget_bytes)
        self.upload = Upload(self._read_more, Holding(self.budget))
        self._reads = asyncio.Event()
        fleet = fleet_of(*map(ModelCard, served))
        self.uploads = Uploads(
            fleet, None, backlog=Backlog(100, 1000), max_wait_seconds=60.0, max_buffered_bytes=BUFFERED, clock=Clock()
        )  # type: ignore[arg-type]
        self.reader = request_reader(self.config)

    def _read_more(self, more: bool) -> None:
        (self._reads.set if more else self._reads.clear)()

    async def send(self, pieces: list[bytes]) -> None:
        """The client: it sends as long as it is read."""
        self._reads.set()
        for piece in pieces:
            for start in range(0, len(piece), 65536):
                await self._reads.wait()
                self.upload.feed(piece[start : start + 65536])
                await asyncio.sleep(0)
        self.upload.end()

    async def read(self) -> InferenceRequest:
        incoming = HttpRequest()
        incoming.headers = {b"content-type": b"multipart/form-data; boundary=b"}
        incoming.stream_body(self.upload)
        incoming.key = self.config.auth.keys[0] if self.config.auth.keys else None
        route = find_route(b"POST", b"/v1/audio/transcriptions")
        connection = ClientConnection(Host(echo), asyncio.get_running_loop())
        return await self.uploads.read(incoming, route, connection, reply_on(FakeWire()), self.reader)

    def passed(self, pieces: list[bytes]) -> tuple[InferenceRequest, bytes]:
        """The request of a whole upload, and what the backend gets."""

        async def main() -> tuple[InferenceRequest, bytes]:
            client = asyncio.create_task(self.send(pieces))
            try:
                request = await self.read()
                assert request.upload is not None
                sent = b"".join([piece async for piece in request.upload])
            finally:
                client.cancel()
                await asyncio.gather(client, return_exceptions=True)
            assert self.budget.used_bytes == 0
            return request, sent

        return run(main())


CUTS = st.lists(st.integers(0, 400), max_size=6)
SERVED = [("whisper", "other"), ("whisper",)]


@given(cuts=CUTS, first=st.booleans(), served=st.sampled_from(SERVED))
def test_the_model_is_found_in_any_split_and_every_byte_is_passed_on(
    cuts: list[int], first: bool, served: tuple[str, ...]
) -> None:
    whole = form(b"whisper", first=first)
    request, sent = Scene(*served).passed(cut(whole, cuts))
    assert (request.demand.model, request.model_choice, sent) == ("whisper", None, whole)


@settings(deadline=None, max_examples=60)
@given(cuts=CUTS, first=st.booleans(), served=st.sampled_from(SERVED), size=st.sampled_from([0, 70_000, 2_000_000]))
def test_an_alias_is_replaced_wherever_it_stands(
    cuts: list[int], first: bool, served: tuple[str, ...], size: int
) -> None:
    whole = form(b"whisper-1", size=size, first=first)
    request, sent = Scene(*served).passed(cut(whole, cuts))
    assert (request.demand.model, sent) == ("whisper", form(b"whisper", size=size, first=first))
    if first:
        assert request.model_choice == ModelChoice("whisper-1")


def test_where_one_model_is_served_nothing_is_buffered_for_its_name() -> None:
    async def main() -> None:
        scene = Scene("whisper")
        scene.upload.feed(form(b"whisper", size=BEYOND, first=False)[:1_100_000])
        request = await scene.read()
        assert (request.demand.model, scene.upload.ended) == ("whisper", False)

    run(main())


@pytest.mark.parametrize("only", [True, False])
def test_a_form_without_a_model_is_for_the_only_one(only: bool) -> None:
    scene = Scene(*SERVED[only])
    if only:
        assert scene.passed([form()])[0].demand.model == "whisper"
    else:
        with pytest.raises(InvalidRequest, match="provide a model"):
            scene.passed([form()])


def test_a_model_behind_more_than_is_buffered_is_not_looked_for() -> None:
    with pytest.raises(InvalidRequest, match="max_buffered_upload_bytes") as error:
        Scene("whisper", "other").passed([form(b"whisper", size=BEYOND, first=False)])
    assert error.value.param == "model"


def test_what_is_buffered_for_the_model_is_in_the_memory_budget() -> None:
    async def main() -> None:
        scene = Scene("whisper", "other", budget_bytes=2_000_000)
        reading = asyncio.create_task(scene.read())
        with pytest.raises(MemoryFull) as full:
            await scene.send([form(b"whisper", size=2_500_000, first=False)])
        scene.upload.end(full.value)  # as the connection does
        with pytest.raises(MemoryFull):
            await reading

    run(main())


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("size", [4, BEYOND])
@pytest.mark.parametrize(
    ("models", "error"),
    [
        ((b"other",), ModelNotAllowed),
        ((b"other-1",), ModelNotAllowed),
        ((b"absent",), ModelNotAllowed),
        ((b"whisper", b"other"), InvalidRequest),
        ((b"whisper", b"whisper"), InvalidRequest),
        ((b"whisper-1", b"other-1"), InvalidRequest),
        ((b"", b"other"), InvalidRequest),
        ((b"whisper\r\n--x",), InvalidRequest),
    ],
)
def test_no_order_of_fields_reaches_a_model_that_the_key_may_not_use(
    served: tuple[str, ...], first: bool, size: int, models: tuple[bytes, ...], error: type[GatewayError]
) -> None:
    scene = Scene(*served, models=["whisper", "whisper-1"])
    if not first and size == BEYOND and len(served) > 1:
        error = InvalidRequest
    with pytest.raises(error):
        scene.passed([form(*models, size=size, first=first)])


@pytest.mark.parametrize(
    "content", [field(b"other")[2:], b"\n" + field(b"other"), b"\r\n--bb\r\n" + field(b"other")[5:]]
)
def test_what_looks_like_a_part_in_the_content_of_the_file_is_its_content(content: bytes) -> None:
    whole = FILE % content + field(b"whisper") + END
    request, sent = Scene("whisper", "other").passed([whole])
    assert (request.demand.model, sent) == ("whisper", whole)


ODD = st.sampled_from(
    [
        b"--b\r\n",
        b"\r\n--b\r\n",
        b"--b--\r\n",
        b"\r\n--b--",
        b"\r\n--b \r\n",
        b"--bb\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b"--",
        b"b",
        b'Content-Disposition: form-data; name="model"\r\n',
        b"content-disposition: form-data; name=model\r\n",
        b'CONTENT-DISPOSITION: form-data; filename="a"; name="model"\r\n',
        b'content-disposition: form-data; name="file"\r\n',
        b'content-disposition: form-data; name="file"; filename="model"\r\n',
        b"content-disposition: form-data;name*=utf-8''model\r\n",
        b'content-disposition: form-data; name="x"; name="model"\r\n',
        b'content-disposition: form-data; name="x\\"; name=model"\r\n',
        b"content-disposition: attachment; name=model\r\n",
        b"Content-Type: text/plain; charset=utf-16\r\n",
        b" folded\r\n",
        b"whisper",
        b"other",
        b"whisper-1",
        b"\0",
    ]
)


@settings(deadline=None, max_examples=500)
@given(odd=st.lists(ODD, max_size=14), cuts=CUTS, at=st.integers(0, 2))
def test_vllm_reads_the_model_that_was_checked_in_any_form(odd: list[bytes], cuts: list[int], at: int) -> None:
    parts = [field(b"whisper"), FILE % b"RIFF", END]
    whole = b"".join([*parts[:at], *odd, *parts[at:]])
    try:
        _, sent = Scene("whisper", "other", models=["whisper", "whisper-1"]).passed(cut(whole, cuts))
    except GatewayError:
        return

    async def read_by_vllm() -> list[object]:
        async def stream() -> AsyncIterator[bytes]:
            yield sent

        found = await MultiPartParser(Headers({"content-type": "multipart/form-data; boundary=b"}), stream()).parse()
        await found.close()
        return found.getlist("model")

    assert run(read_by_vllm()) == ["whisper"]


def test_a_late_model_that_is_not_served_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        Scene("whisper").passed([form(b"absent", size=BEYOND, first=False)])


def test_a_key_for_an_alias_alone_may_not_use_its_model() -> None:
    assert Scene("whisper", models=["whisper-1"]).passed([form(b"whisper-1")])[0].demand.model == "whisper"
    with pytest.raises(ModelNotAllowed):
        Scene("whisper", models=["whisper-1"]).passed([form(b"whisper")])


@pytest.mark.parametrize("value", [b"true", b"True", b"1", b"on"])
def test_a_stream_is_known_as_one(value: bytes) -> None:
    whole = field(value, b"stream") + form(b"whisper")
    assert Scene("whisper").passed([whole])[0].demand.streams
    assert not Scene("whisper").passed([form(b"whisper")])[0].demand.streams


def test_an_upload_that_breaks_off_in_its_form_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="last boundary"):
        Scene("whisper").passed([form(b"whisper")[:-4]])


def test_a_client_that_leaves_while_its_model_is_looked_for_ends_the_look() -> None:
    async def main() -> None:
        scene = Scene("whisper", "other")
        reading = asyncio.create_task(scene.read())
        scene.upload.feed(form(b"whisper", size=2_000_000, first=False)[:1_500_000])
        await turns(60)
        assert not reading.done()
        scene.upload.end(InvalidRequest("gone"))
        with pytest.raises(InvalidRequest, match="gone"):
            await reading

    run(main())


@pytest.mark.parametrize(
    "pieces",
    [
        [FILE[:-4], *[b"x"] * 30_000],
        [FILE[:-4], b"\r\n--b" * 200_000],
        [FILE[:-4], b"\r\n--bx" * 170_000],
        [FILE[:-4], b"\r" * 1_000_000],
        [b"--b\r\n", b"content-disposition: form-data; name=model;\r\n" * 24_000],
        [b"--b\r\n", b"content-disposition: form-data; " + b"name=model;" * 300 + b"\r\n\r\n"],
        [field(b"x", b"y") * 20_000],
        [b"\r\n" * 500_000],
        [b"--b\r\n", b"a" * 1_000_000],
    ],
    ids=["single bytes", "delimiters", "almost", "returns", "headers", "names", "fields", "line ends", "long header"],
)
def test_no_upload_is_slow_to_look_through(pieces: list[bytes]) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest):
        Scene("whisper", "other").passed(pieces)
    assert time.thread_time() - began < 2 + 2e-5 * len(pieces)
