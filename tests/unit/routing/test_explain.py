import pytest

from gateway.core.routing.engine import Engine, Parts
from gateway.core.routing.policy import EngineVerdict, as_header
from gateway.features.page.decisions import as_document
from tests.unit.routing.crowds import work

PARTS = Parts(ahead=0.01, prefill=0.0205, cache=0.0, stall=0.0, steps=0.008, slowdown=0.0, slot=0.0, memory=1.5)
BEST = EngineVerdict(Engine(0, "a"), 1.5385, 496, True, PARTS)
RANKED = EngineVerdict(Engine(1, "b", rank=3), 12.0, 0, False, None)


def test_a_header_line_has_each_engine_best_first_with_what_counts() -> None:
    assert as_header([BEST, RANKED]) == (
        b"a;cost=1538;hit=496;open=1;ahead=10;prefill=20.5;steps=8;memory=1500, b#3;cost=12;hit=0;open=0"
    )
    assert as_header([]) == b""


@pytest.mark.parametrize("name", ["b\u00fc", "\u540d"])
def test_a_name_that_no_header_can_hold_is_replaced(name: str) -> None:
    assert as_header([EngineVerdict(Engine(0, name), 1.0, 0, True, None)]).isascii()


def test_a_document_says_the_same_in_milliseconds() -> None:
    RANKED.engine.load.start(work(2, 100, 0.0, observable=True), 0.0)
    one, other = as_document([BEST, RANKED])
    assert one == {
        "backend": "a", "rank": None, "open": True, "in_flight": 0, "hit_tokens": 496, "cost": 1538.5,
        "cost_parts_ms": {"ahead": 10.0, "prefill": 20.5, "cache": 0.0, "stall": 0.0, "steps": 8.0, "slowdown": 0.0,
                          "slot": 0.0, "memory": 1500.0, "adapter": 0.0},
    }  # fmt: skip
    assert other == {
        "backend": "b", "rank": 3, "open": False, "in_flight": 2, "hit_tokens": 0, "cost": 12.0, "cost_parts_ms": {},
    }  # fmt: skip
