"""Pieces take turns between tenants, and leave a quarter of the slots to short requests."""

import asyncio
from collections.abc import Callable

from gateway.embeddings.fair_queue import Piece
from gateway.embeddings.rerank import PieceQueue, PieceTurns
from gateway.embeddings.sizes import BulkSlots, ModelSizes
from tests.unit.scheduling.virtual_time import run, turns


def queue_of(slots: int, update: Callable[[ModelSizes], None] = lambda _: None) -> tuple[PieceQueue, ModelSizes]:
    sizes = ModelSizes(BulkSlots().add(lambda: queue.next_items, lambda: queue.look()))
    sizes.total_limit = slots
    queue = PieceQueue(sizes, lambda: update(sizes))
    return queue, sizes


def pieces_of(count: int, items: int = 8, tenant: str = "a") -> Callable[[PieceTurns], list[Piece[PieceTurns]]]:
    return lambda turns: [Piece(turns, items * n, items, 64, 1, tenant=tenant, alone=True) for n in range(count)]


class Pieces:
    """Pieces that stay until they are let go."""

    def __init__(self, queue: PieceQueue) -> None:
        self.queue = queue
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.go: dict[str, asyncio.Event] = {}

    def come(self, name: str, items: int = 8) -> None:
        self.go[name] = asyncio.Event()
        self.tasks[name] = asyncio.get_running_loop().create_task(self._stay(name, items))

    async def _stay(self, name: str, items: int) -> None:
        with self.queue.turns(1, pieces_of(1, items, name[0])) as waiting:
            async for _ in waiting:
                self.inside.append(name)
                await self.go[name].wait()
        self.inside.remove(name)

    async def leave(self, *names: str) -> None:
        for name in names:
            self.go[name].set()
        await turns(4)


def test_a_quarter_of_the_slots_is_left() -> None:
    async def main() -> None:
        queue, sizes = queue_of(32)
        pieces = Pieces(queue)
        for number in range(6):
            pieces.come(f"a{number}")
        await turns(3)
        assert (len(pieces.inside), sizes.bulk.items) == (3, 24)
        await pieces.leave("a0")
        assert pieces.inside == ["a1", "a2", "a3"]
        await pieces.leave("a1", "a2", "a3", "a4", "a5")
        assert queue.busy == 0

    run(main())


def test_what_engines_may_be_given_now_counts() -> None:
    async def main() -> None:
        now = [32, 8, 24]

        def update(sizes: ModelSizes) -> None:
            sizes.total_limit = now[0]

        queue, _ = queue_of(32, update)
        pieces = Pieces(queue)
        for number in range(6):
            pieces.come(f"a{number}")
        await turns(3)
        assert pieces.inside == ["a0", "a1", "a2"]
        now.pop(0)
        await pieces.leave("a0", "a1")
        assert pieces.inside == ["a2"]
        now.pop(0)
        await pieces.leave("a2")
        assert pieces.inside == ["a3", "a4"]
        await pieces.leave("a3", "a4", "a5")
        assert queue.busy == 0

    run(main())


def test_one_piece_may_always_go() -> None:
    async def main() -> None:
        queue, _ = queue_of(1)
        pieces = Pieces(queue)
        pieces.come("a0")
        pieces.come("b0")
        await turns(3)
        assert pieces.inside == ["a0"]
        await pieces.leave("a0")
        assert pieces.inside == ["b0"]
        await pieces.leave("b0")
        assert queue.busy == 0

    run(main())


def test_tenants_take_turns() -> None:
    async def main() -> None:
        queue, _ = queue_of(8)
        pieces, order = Pieces(queue), []
        for name in ("a0", "a1", "a2", "a3", "b0", "b1"):
            pieces.come(name)
            await turns(1)
        while pieces.inside:
            order.append(pieces.inside[0])
            await pieces.leave(pieces.inside[0])
        assert max(order.index("b0"), order.index("b1")) < order.index("a3")
        assert len(order) == 6

    run(main())


def test_a_piece_that_leaves_while_waiting_or_just_when_it_may_begin_takes_nothing() -> None:
    async def main() -> None:
        queue, sizes = queue_of(8)
        pieces = Pieces(queue)
        for name in ("a0", "a1", "a2", "a3"):
            pieces.come(name)
        await turns(3)
        pieces.tasks["a1"].cancel()
        await turns(3)
        pieces.go["a0"].set()
        pieces.tasks["a2"].cancel()  # in the turn in which its place comes free
        await turns(5)
        assert pieces.inside == ["a3"]
        assert sizes.bulk.items == 8
        pieces.tasks["a3"].cancel()
        await turns(3)
        assert queue.busy == 0

    run(main())


def test_a_list_begins_its_pieces_as_slots_come_free_and_gives_up_all_when_it_leaves() -> None:
    async def main() -> None:
        queue, sizes = queue_of(32)
        with queue.turns(100, pieces_of(100)) as waiting:
            pieces = aiter(waiting)
            begun = [await anext(pieces) for _ in range(3)]
            assert [piece.start for piece in begun] == [0, 8, 16]
            assert (sizes.bulk.items, queue.busy) == (24, 97 + 24)
            waiting.ended(begun[1])
            waiting.ended(begun[1])
            assert (await anext(pieces)).start == 24
            assert sizes.bulk.items == 24
        assert (queue.busy, sizes.bulk.items) == (0, 0)

    run(main())


def test_a_list_that_leaves_makes_room_for_others_only() -> None:
    async def main() -> None:
        queue, _ = queue_of(8)
        with queue.turns(1000, pieces_of(1000)):
            context = queue.turns(1, pieces_of(1))
            other = context.__enter__()
        later = await anext(aiter(other))
        assert later.owner is other
        context.__exit__(None, None, None)
        assert queue.busy == 0

    run(main())
