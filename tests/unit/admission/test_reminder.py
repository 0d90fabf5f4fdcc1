import asyncio

import pytest

from gateway.admission.reminder import Reminder
from tests.unit.admission.virtual_time import run


def test_one_who_waits_is_reminded_every_so_often_until_the_block_ends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began, seen = loop.time(), list[float]()
        with Reminder(15.0, lambda: seen.append(loop.time() - began)):
            await asyncio.sleep(50.0)
        await asyncio.sleep(50.0)
        assert seen == pytest.approx([15.0, 30.0, 45.0])

    run(main())


@pytest.mark.parametrize(("seconds", "listens"), [(0.0, True), (15.0, False)])
def test_nobody_is_reminded_where_that_is_switched_off_or_nobody_listens(seconds: float, listens: bool) -> None:
    async def main() -> None:
        seen: list[int] = []
        with Reminder(seconds, (lambda: seen.append(1)) if listens else None):
            await asyncio.sleep(50.0)
        assert seen == []

    run(main())


def test_a_block_that_raises_reminds_nobody_any_more() -> None:
    async def main() -> None:
        seen: list[int] = []
        with pytest.raises(ZeroDivisionError), Reminder(1.0, lambda: seen.append(1)):
            raise ZeroDivisionError
        await asyncio.sleep(5.0)
        assert seen == []

    run(main())
