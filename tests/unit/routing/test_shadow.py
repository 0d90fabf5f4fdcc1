from random import Random

import pytest

from gateway.request import Ask
from gateway.routing.blocks import prefix_keys, seed
from gateway.routing.seat import Seat
from gateway.routing.shadow import Shadow

SEATS = [Seat(number, name) for number, name in ((0, "a"), (3, "b"), (4, "c"))]


def asking(text: str, *more: str, model: str = "m") -> Ask:
    keys, edges, _ = prefix_keys([piece.encode() for piece in (text, *more)], seed(model))
    text += "".join(more)
    return Ask(model, keys=keys, edges=edges, prompt_size=len(text), prompt_tokens=len(text) // 4)


def shadow(capacity_bytes: int = 1 << 30) -> Shadow:
    thought = Shadow(1 << 20)
    for seat in SEATS:
        thought.resize(seat.index, capacity_bytes)
    return thought


def test_each_model_goes_round_its_engines() -> None:
    thought = shadow()
    assert [thought.next("m", SEATS).name for _ in range(2)] == ["a", "a"]
    order = []
    for _ in range(4):
        order.append(thought.next("m", SEATS).name)
        thought.hit_tokens(asking("x" * 400), SEATS)
    assert order == list("abca")
    assert thought.next("other", SEATS).name == "a"


def test_a_prompt_is_found_again_when_its_turn_comes_round() -> None:
    thought = shadow()
    hits = [thought.hit_tokens(asking("x" * 4000), SEATS) for _ in range(6)]
    assert hits == [0, 0, 0, 3 * 992, 0, 0]
    assert thought.hit_tokens(asking("x" * 4000 + "y" * 4000), SEATS) >= 3 * 900


def test_what_one_engine_finds_comes_to_what_all_would_find_together() -> None:
    random, told, found = Random(1), 0, 0
    thought, each = shadow(), [(shadow(), [seat]) for seat in SEATS]
    for turn in range(3000):
        prompt = asking(random.choice("abcdefgh") * 4000)
        told += thought.hit_tokens(prompt, SEATS)
        alone, seats = each[turn % len(SEATS)]
        found += alone.hit_tokens(prompt, seats)
    assert told == pytest.approx(found, rel=0.02)


def test_its_records_are_no_larger_than_the_engines_caches() -> None:
    thought = shadow(capacity_bytes=2048)
    found = [thought.hit_tokens(asking("x" * 4000), SEATS[:1]) for _ in range(2)]
    assert found[0] == 0
    assert 512 <= found[1] < 992


def test_the_turn_passes_over_an_engine_that_is_gone() -> None:
    thought = shadow()
    thought.hit_tokens(asking("x"), SEATS)
    assert thought.next("m", [SEATS[0], SEATS[2]]).name == "c"
    assert thought.next("m", SEATS[:1]).name == "a"


def test_without_keys_there_is_no_hit() -> None:
    assert shadow().hit_tokens(Ask("m"), SEATS) == 0


def test_turns_go_by_number_in_whatever_order_the_engines_are_listed() -> None:
    thought, listed = shadow(), [SEATS[1], SEATS[2], SEATS[0]]
    order = []
    for _ in range(4):
        order.append(thought.next("m", listed).name)
        thought.hit_tokens(asking("x" * 400), listed)
    assert order == list("abca")


def test_what_it_would_have_found_is_never_told_too_small() -> None:
    for shared in range(0, 4000, 100):
        thought, alone = shadow(), SEATS[:1]
        thought.hit_tokens(asking("x" * 4000), alone)
        found = thought.hit_tokens(asking("x" * shared + "y" * (4000 - shared)), alone)
        known = asking("x" * shared).tokens_of(len(asking("x" * shared).keys)) if shared >= 512 else 0
        assert known // 16 * 16 - 32 <= found <= known + 2 * 256


def test_an_engine_without_a_prefix_cache_finds_nothing() -> None:
    thought, bare = shadow(), [Seat(0, "a", caches_prefixes=False)]
    assert [thought.hit_tokens(asking("x" * 4000), bare) for _ in range(2)] == [0, 0]
