import asyncio

import pytest

from gateway.embeddings.waiter import Waitlist
from gateway.errors import DeadlineUnmeetable, QueueFull, WaitExpired
from gateway.request import Demand, InferenceRequest, Kind
from gateway.scheduling.backlog import Backlog
from tests.unit.scheduling.virtual_time import run


def waiting(max_requests: int = 100, max_bytes: int = 1000, most_seconds: float = 5.0) -> Waitlist:
    return Waitlist(Backlog(max_requests, max_bytes), most_seconds, lambda _: 3.0)


def request(size_bytes: int = 10, deadline_seconds: float | None = None) -> InferenceRequest:
    ask = Demand("m", size_bytes=size_bytes, deadline_seconds=deadline_seconds)
    return InferenceRequest("embeddings", Kind.POOL, b"POST", b"/v1/embeddings", ask, "id-1")


def test_no_more_wait_than_may() -> None:
    here = waiting(max_requests=2, max_bytes=100)
    here.join("a", request(60))
    here.refuse_if_full(request(34), "things")
    with pytest.raises(QueueFull, match="1 requests are waiting") as full:
        here.refuse_if_full(request(35), "things")  # one byte in sixteen is kept for the queue
    assert full.value.retry_after_seconds == 3.0
    here.join("b", request(1))
    with pytest.raises(QueueFull):
        here.refuse_if_full(request(1), "things")


def test_a_request_that_leaves_makes_room_once() -> None:
    here = waiting(max_requests=2, max_bytes=100)
    for name in "ab":
        here.join(name, request(40))
    for _ in range(2):
        here.leave("a")
    here.refuse_if_full(request(54), "things")
    with pytest.raises(QueueFull):
        here.refuse_if_full(request(55), "things")
    assert len(here) == 1


@pytest.mark.parametrize(
    ("deadline_seconds", "error", "ends_after"), [(None, WaitExpired, 5.0), (2.0, DeadlineUnmeetable, 2.0)]
)
def test_a_wait_ends_in_time(
    deadline_seconds: float | None, error: type[WaitExpired | DeadlineUnmeetable], ends_after: float
) -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        began = now()
        deadline = None if deadline_seconds is None else began + deadline_seconds
        with pytest.raises(error, match="busy with other things") as raised:
            async with waiting().place("a", request(deadline_seconds=deadline), began, "things"):
                await asyncio.sleep(60)
        assert raised.value.retry_after_seconds == 3.0
        assert now() - began == pytest.approx(ends_after)

    run(main())


def test_a_wait_that_is_over_lasts_as_long_as_it_likes() -> None:
    async def main() -> None:
        began = asyncio.get_running_loop().time()
        async with waiting().place("a", request(), began, "things") as wait:
            wait.reschedule(None)
            await asyncio.sleep(60)

    run(main())


def test_a_place_counts_until_its_block_ends_or_says_so() -> None:
    async def main() -> None:
        here = waiting(max_requests=1)
        async with here.place("a", request(), 0.0, "things"):
            with pytest.raises(QueueFull):
                here.refuse_if_full(request(), "things")
            here.leave("a")
            here.refuse_if_full(request(), "things")
        with pytest.raises(WaitExpired):
            async with here.place("a", request(), 0.0, "things"):
                await asyncio.sleep(60)
        assert len(here) == 0
        here.refuse_if_full(request(), "things")

    run(main())
