import asyncio

import pytest

from gateway.config import AdmissionConfig
from gateway.embeddings.waiting import Waiting
from gateway.errors import DeadlineUnmeetable, QueueFull, WaitExpired
from gateway.request import Ask, InferenceRequest, Kind
from tests.unit.admission.virtual_time import run


def waiting(**bounds: float) -> Waiting[str]:
    return Waiting(AdmissionConfig.model_validate(bounds), lambda _: 3.0, "wait", "things")


def request(size_bytes: int = 10, deadline_seconds: float | None = None) -> InferenceRequest:
    ask = Ask("m", size_bytes=size_bytes, deadline_seconds=deadline_seconds)
    return InferenceRequest("embeddings", Kind.POOL, b"POST", b"/v1/embeddings", ask, "id-1")


def test_one_may_always_wait_and_more_only_within_the_bounds() -> None:
    here = waiting(max_queued_requests=2, max_queued_bytes=100)
    here.refuse_what_is_too_much(request(1000))
    here.join("a", request(60))
    here.refuse_what_is_too_much(request(40))
    with pytest.raises(QueueFull, match="1 wait already") as full:
        here.refuse_what_is_too_much(request(41))
    assert full.value.retry_after_seconds == 3.0
    here.join("b", request(1))
    with pytest.raises(QueueFull):
        here.refuse_what_is_too_much(request(1))


def test_who_leaves_makes_room_once() -> None:
    here = waiting(max_queued_requests=100, max_queued_bytes=100)
    for who in "ab":
        here.join(who, request(50))
    for _ in range(2):
        here.leave("a")
    here.refuse_what_is_too_much(request(50))
    with pytest.raises(QueueFull):
        here.refuse_what_is_too_much(request(51))
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
        with pytest.raises(error, match="busy with other things") as told:
            async with waiting(max_wait_seconds=5).in_time(request(deadline_seconds=deadline), began):
                await asyncio.sleep(60)
        assert told.value.retry_after_seconds == 3.0
        assert now() - began == pytest.approx(ends_after)

    run(main())


def test_a_wait_that_has_no_end_and_one_that_is_over_last_as_long_as_they_like() -> None:
    async def main() -> None:
        began = asyncio.get_running_loop().time()
        async with waiting(max_wait_seconds=5).in_time(request(), began, ends=False):
            await asyncio.sleep(60)
        async with waiting(max_wait_seconds=5).in_time(request(), began + 60) as wait:
            wait.reschedule(None)
            await asyncio.sleep(60)

    run(main())
