"""Uploads that still arrive take a share of the slots; what a model does not offer is refused for a while."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.core.backends.facts import ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.errors import EndpointNotOffered, QueueFull, WaitExpired
from gateway.core.front.body import Upload
from gateway.core.front.reply import ClientResponse
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, Kind, UpstreamResult
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.scheduling.fair_share import Backlog
from gateway.features.uploads.audio import UploadForm, Uploads
from tests.unit.front.wires import Clock, FakeWire, fleet_of, reply_on
from tests.unit.scheduling.virtual_time import run, turns


class Scene:
    """Uploads of one model with eight slots, whose requests run until they are released."""

    def __init__(self, slots: int = 8) -> None:
        self.fleet: Fleet = fleet_of(ModelCard("m"))
        self.fleet.backends[0].limiter.limit = slots
        self.clock = Clock()
        self.running: list[str] = []
        self.release = asyncio.Event()
        self.error: Exception | None = None
        self.backlog = Backlog(100, 1000)
        self.uploads = Uploads(
            self.fleet, self, backlog=self.backlog, max_wait_seconds=60.0, max_buffered_bytes=1000, clock=self.clock
        )

    async def dispatch(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        record.backend = "a"
        self.running.append(request.request_id)
        if self.error is not None:
            raise self.error
        await self.release.wait()
        return UpstreamResult(200, None, None)

    def send(self, name: str, upload: Upload, endpoint: str = "transcriptions") -> "asyncio.Task[UpstreamResult]":
        form = UploadForm(upload, b"b")
        request = InferenceRequest(endpoint, Kind.UPLOAD, b"POST", b"/", Demand("m"), name, upload=form)
        record = Record(name, endpoint, 0.0)
        return asyncio.get_running_loop().create_task(
            self.uploads.dispatch(request, reply_on(FakeWire()), record), name=name
        )

    def all_sent(self, uploads: list[Upload]) -> "list[asyncio.Task[UpstreamResult]]":
        return [self.send(str(number), upload) for number, upload in enumerate(uploads)]


def play(story: Callable[[Scene], Awaitable[None]], slots: int = 8) -> None:
    async def main() -> None:
        scene = Scene(slots)
        await story(scene)
        assert (scene.uploads._arriving, scene.uploads._waiting) == ({}, {})
        assert (scene.backlog.requests, scene.backlog.size_bytes) == (0, 0)

    run(main())


def arriving() -> Upload:
    return Upload(lambda _: None, Holding(MemoryBudget(1000)))


def complete() -> Upload:
    upload = arriving()
    upload.end()
    return upload


def test_a_quarter_of_the_slots_is_given_to_uploads_that_still_arrive_in_turn() -> None:
    async def story(scene: Scene) -> None:
        uploads = [arriving() for _ in range(5)]
        tasks = scene.all_sent(uploads)
        await turns(3)
        assert scene.running == ["0", "1"]
        uploads[1].end()
        await turns(3)
        assert scene.running == ["0", "1", "2"]
        for upload in uploads:
            upload.end()
            upload.end()  # called twice, counted once
        await turns(9)
        assert scene.running == ["0", "1", "2", "3", "4"]
        scene.release.set()
        await asyncio.gather(*tasks)

    play(story)


@pytest.mark.parametrize("slots", [1, 3])
def test_where_there_are_few_slots_one_upload_may_arrive(slots: int) -> None:
    async def story(scene: Scene) -> None:
        scene.release.set()
        uploads = [arriving(), arriving()]
        await asyncio.gather(*scene.all_sent(uploads))
        assert scene.running == ["0", "1"]

    play(story, slots)


def test_complete_uploads_wait_for_no_turn() -> None:
    async def story(scene: Scene) -> None:
        tasks = scene.all_sent([arriving(), arriving(), *(complete() for _ in range(6))])
        await turns(3)
        assert len(scene.running) == 8
        scene.release.set()
        await asyncio.gather(*tasks)

    play(story)


@pytest.mark.parametrize("granted", [False, True])
def test_who_leaves_while_it_waits_takes_nobodys_turn(granted: bool) -> None:
    async def story(scene: Scene) -> None:
        uploads = [arriving() for _ in range(4)]
        tasks = scene.all_sent(uploads)
        await turns(3)
        if granted:
            uploads[0].end()  # the third may go, and leaves before it does
        tasks[2].cancel()
        await turns(3)
        uploads[1].end()
        await turns(3)
        assert scene.running == ["0", "1", "3"]
        scene.release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[2], asyncio.CancelledError)

    play(story)


def test_an_upload_that_waits_too_long_is_refused() -> None:
    async def story(scene: Scene) -> None:
        tasks = scene.all_sent([arriving() for _ in range(3)])
        with pytest.raises(WaitExpired) as refused:
            await tasks[2]
        assert refused.value.retry_after_seconds
        scene.release.set()
        await asyncio.gather(*tasks[:2])

    play(story)


def test_uploads_that_wait_are_in_the_queue_with_their_bytes() -> None:
    async def story(scene: Scene) -> None:
        uploads = [arriving() for _ in range(5)]
        for upload in uploads:
            upload.feed(b"x" * 400)
        tasks = scene.all_sent(uploads)
        await turns(3)
        assert (scene.backlog.requests, scene.backlog.size_bytes) == (2, 800)  # two others run
        with pytest.raises(QueueFull) as refused:
            await tasks[4]
        assert refused.value.retry_after_seconds
        scene.release.set()
        await asyncio.gather(*tasks[:4])

    play(story)


def test_an_endpoint_that_no_backend_offers_is_refused_for_a_minute_or_until_a_restart() -> None:
    async def story(scene: Scene) -> None:
        scene.error = EndpointNotOffered("no")

        async def refused(endpoint: str = "transcriptions") -> int:
            with pytest.raises(EndpointNotOffered):
                await scene.send("x", complete(), endpoint)
            return len(scene.running)

        assert await refused() == 1
        assert await refused() == 1
        assert await refused("translations") == 2
        scene.clock.now += 61
        assert await refused() == 3
        assert await refused() == 3
        for restarted in scene.fleet.on_restart:
            restarted(scene.fleet.backends[0])
        assert await refused() == 4

    play(story)
