from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.backends.backend import Facts, ModelCard
from gateway.backends.fleet import Fleet
from gateway.config import BackendConfig, Config, HealthConfig, RoutingConfig
from gateway.feedback import CacheState, TrustLog
from gateway.observe.record import Record
from gateway.request import Ask, Usage
from gateway.routing.cost import Seat
from gateway.routing.exact_index import packed, token_keys, token_seed
from gateway.routing.prompt_blocks import prefix_keys, seed

BLOCK_TOKENS = 16
KV_TOKENS = 10_000


class Scene:
    """Backends a and b; b may run two engines."""

    def __init__(self, engines: int = 1, **facts: Any) -> None:
        configs = tuple(BackendConfig(url=f"http://10.0.0.{number}:1", name="ab"[number]) for number in range(2))
        self.fleet = Fleet(configs, HealthConfig(), clock=lambda: 0.0, random=Random(1))
        self.in_flight: dict[int, int] = {}
        config = Config(backends=configs, routing=RoutingConfig(index_memory_bytes=1 << 22))
        self.cache_state = CacheState(config, self.fleet, lambda seat: self.in_flight.get(seat, 0))
        self.fleet.on_change.append(self.cache_state.follow_sizes)
        self.fleet.on_restart.append(self.cache_state.forget)
        self.a, self.b = self.fleet.backends
        self.learn_facts(engines, **facts)

    def learn_facts(self, engines: int = 1, **facts: Any) -> None:
        known = {"models": (ModelCard("m"),), "kv_cache_tokens": KV_TOKENS, **facts}
        self.fleet.learned(self.a, Facts(**known))
        self.fleet.learned(self.b, Facts(**known | {"engines": engines, "kv_cache_tokens": engines * KV_TOKENS}))

    def hits(self, ask: Ask) -> list[int]:
        seats = [Seat(engine.index, engine.name) for engine in self.cache_state.engines()]
        return self.cache_state.hits.of(ask, seats)

    def sent(self, ask: Ask, seat: int) -> None:
        """The request is placed there."""
        self.cache_state.hits.placed(ask, Seat(seat, "?"))

    def answered(self, ask: Ask, seat: int, predicted: int, cached: int | None, output: int = 1) -> None:
        record = Record("id", "chat", 0.0)
        record.model, record.ask, record.seat_index, record.predicted_hit_tokens = ask.model, ask, seat, predicted
        record.usage = Usage(ask.prompt_tokens, output, cached)
        self.cache_state.learn(record)

    def over(self, now: float) -> None:
        """Some request is over, without an answer."""
        record = Record("id", "chat", 0.0)
        record.ended_seconds = now
        self.cache_state.learn(record)


def asking(text: str, exact: bool = False) -> Ask:
    """A prompt of four bytes a token; `exact`: its tokens are known."""
    keys, edges, _ = prefix_keys([text.encode()], seed("m"))
    size = len(text)
    blocks = token_keys(packed(list(text.encode()[::4])), BLOCK_TOKENS, token_seed()) if exact else ()
    return Ask(
        "m", keys=keys, edges=edges, prompt_size=size, prompt_tokens=size // 4, learnable_bytes=size, token_keys=blocks
    )


def test_what_was_sent_to_an_engine_is_a_hit_there_and_its_backend_holds_it() -> None:
    scene, ask = Scene(), asking("x" * 4096)
    scene.sent(ask, scene.a.index)
    assert scene.hits(ask) == [1008, 0]
    assert scene.cache_state.holders(ask.keys[-1]) == ["a"]
    assert scene.cache_state.holders(1) == []


def test_every_engine_of_a_backend_has_a_number_of_its_own() -> None:
    scene = Scene(engines=2)
    seats = [scene.cache_state.seat_of("b", rank) for rank in range(2)]
    assert [engine.index for engine in scene.cache_state.engines()] == [scene.a.index, *seats]
    assert scene.cache_state.seat_of("a", 0) == scene.a.index
    for seat, rank in zip(seats, range(2), strict=True):
        assert seat is not None
        engine = scene.cache_state.engine_of(seat)
        assert engine is not None
        assert (engine.name, engine.rank) == ("b", rank)


@pytest.mark.parametrize(("backend", "rank"), [("b", 2), ("a", 1), ("nobody", 0)])
def test_an_engine_that_does_not_exist_has_no_number(backend: str, rank: int) -> None:
    assert Scene(engines=2).cache_state.seat_of(backend, rank) is None


def test_records_are_as_large_as_the_caches_by_the_bytes_a_token_that_were_learned() -> None:
    scene, long = Scene(), asking("x" * 200_000)
    scene.sent(long, scene.a.index)
    assert scene.cache_state.index.used_bytes(scene.a.index) <= KV_TOKENS * 4 < 200_000
    for number in range(100):  # eight bytes a token
        ask = asking(f"{number} " + "y" * 3000)
        ask.prompt_tokens = ask.prompt_size // 8
        scene.answered(ask, scene.b.index, 0, 0)
    scene.cache_state.follow_sizes()
    scene.sent(long, scene.a.index)
    assert KV_TOKENS * 6 < scene.cache_state.index.used_bytes(scene.a.index) <= KV_TOKENS * 8


@pytest.mark.parametrize("told", [None, 0])
def test_a_cache_of_unknown_size_has_a_large_record(told: int | None) -> None:
    scene, long = Scene(), asking("x" * 200_000)
    scene.fleet.learned(scene.a, Facts(models=(ModelCard("m"),), kv_cache_tokens=told))
    scene.cache_state.follow_sizes()
    scene.sent(long, scene.a.index)
    assert scene.cache_state.index.used_bytes(scene.a.index) == 200_000


def test_a_backend_that_restarted_holds_nothing_and_is_trusted_again() -> None:
    scene, ask = Scene(process_start_seconds=1.0), asking("x" * 4096)
    for seat in (scene.a.index, scene.b.index):
        scene.sent(ask, seat)
    for _ in range(10):
        scene.answered(ask, scene.a.index, 512, 0)
    assert scene.cache_state.trust.share(scene.a.index) < 0.5
    scene.learn_facts(process_start_seconds=2.0)
    assert scene.hits(ask) == [0, 0]
    assert scene.cache_state.trust.share(scene.a.index) == 1.0


def test_all_engines_of_a_backend_that_restarted_hold_nothing() -> None:
    scene, ask = Scene(engines=2), asking("x" * 4096)
    for engine in scene.cache_state.engines():
        scene.sent(ask, engine.index)
    scene.cache_state.forget(scene.b)
    assert scene.hits(ask) == [1008, 0, 0]


def test_an_engines_own_blocks_count_while_all_of_them_are_known() -> None:
    scene, ask = Scene(), asking("x" * 4096, exact=True)
    seat, tell = scene.a.index, scene.cache_state.changed
    scene.sent(ask, seat)
    tell(seat, ask.token_keys[:10], (), 160)
    for live, whole, hits in [(True, False, 1008), (True, True, 160), (False, False, 1008), (True, True, 160)]:
        scene.cache_state.state(seat, live, whole)
        assert scene.hits(ask)[seat] == hits
    tell(seat, (), ask.token_keys[3:10], 48)
    assert scene.hits(ask)[seat] == 48


def test_blocks_on_their_way_count_until_they_are_told_evicted_or_never_come() -> None:
    scene, ask, seat = Scene(), asking("x" * 4096, exact=True), 0
    scene.cache_state.state(seat, True, True)
    tell, keys = scene.cache_state.changed, ask.token_keys

    def never_comes() -> None:
        for seconds in (100.0, 200.0, 300.0):
            scene.over(seconds)

    ends: list[tuple[Callable[[], None], int]] = [
        (lambda: tell(seat, keys, (), 1024), 1008),
        (lambda: tell(seat, (), keys, 0), 0),
        (lambda: scene.cache_state.cleared(seat), 0),
        (never_comes, 0),
    ]
    for end, hit in ends:
        tell(seat, (), keys, 0)
        scene.sent(ask, seat)
        assert scene.hits(ask)[seat] == 1008
        end()
        assert scene.hits(ask)[seat] == hit


def answering(scene: Scene, ask: Ask, seat: int, now: float, cached: int = 0) -> None:
    """The request is sent and answered."""
    scene.sent(ask, seat)
    record = Record("id", "chat", now)
    record.model, record.ask, record.seat_index, record.ended_seconds = "m", ask, seat, now
    record.usage = Usage(ask.prompt_tokens, 1, cached)
    scene.cache_state.learn(record)


def test_an_engine_that_answers_and_tells_nothing_is_silent_and_the_record_is_used_again() -> None:
    scene, seat = Scene(), 0
    first, second = asking("abcd" * 1024, exact=True), asking("efgh" * 1024, exact=True)
    scene.cache_state.state(seat, True, True)
    with capture_logs() as logs:
        answering(scene, first, seat, 100.0)
        answering(scene, second, seat, 102.0)
        assert scene.cache_state.exact.live(seat)
        scene.over(103.5)
        assert not scene.cache_state.exact.live(seat)
        scene.over(130.0)
        assert [scene.hits(ask)[seat] for ask in (first, second)] == [1008, 1008]
        scene.cache_state.changed(seat, second.token_keys, (), 1024)
        assert scene.cache_state.exact.live(seat)
        assert [scene.hits(ask)[seat] for ask in (first, second)] == [0, 1008]
    told = [(entry["log_level"], entry["silent"]) for entry in logs if entry["event"] == "kv_events_silent"]
    assert told == [("warning", True), ("info", False)]


def test_an_engine_that_had_nothing_new_to_tell_is_not_silent() -> None:
    scene, ask, seat = Scene(), asking("abcd" * 1024, exact=True), 0
    scene.cache_state.state(seat, True, True)
    scene.cache_state.changed(seat, ask.token_keys, (), 1024)
    for number in range(10):
        answering(scene, ask, seat, 100.0 + number, cached=1008)
    answering(scene, asking("wxyz" * 1024, exact=True), seat, 200.0)
    scene.cache_state.changed(seat, (1, 2), (), 1056)
    scene.over(300.0)
    assert scene.cache_state.exact.live(seat)


def test_a_new_connection_ends_a_silence() -> None:
    scene, seat = Scene(), 0
    scene.cache_state.state(seat, True, True)
    answering(scene, asking("abcd" * 1024, exact=True), seat, 100.0)
    scene.over(110.0)
    for whole in (False, True):
        scene.cache_state.state(seat, True, whole)
        assert scene.cache_state.exact.live(seat) == whole


def test_evictions_shrink_the_record_to_what_is_held_and_on_its_way() -> None:
    scene, seat = Scene(), 0
    older, newer = asking("x" * 8192), asking("y" * 8192)
    for ask in (older, newer):
        scene.sent(ask, seat)
    scene.cache_state.state(seat, True, True)
    scene.cache_state.changed(seat, (), (77,), 2048 + 2048)
    assert [scene.hits(ask)[seat] for ask in (older, newer)] == [2032, 2032]
    scene.in_flight[seat] = 1024
    scene.cache_state.changed(seat, (), (78,), 1024)
    assert [scene.hits(ask)[seat] for ask in (older, newer)] == [0, 2032]
    scene.in_flight[seat] = 0
    scene.cache_state.changed(seat, (), (79,), 0)
    assert scene.cache_state.index.used_bytes(seat) == 0


def test_a_view_that_is_dropped_or_not_whole_takes_nothing_from_the_record() -> None:
    scene, ask, seat = Scene(), asking("x" * 4096, exact=True), 0
    scene.sent(ask, seat)
    scene.cache_state.state(seat, True, True)
    scene.cache_state.changed(seat, ask.token_keys, (), 1024)
    for live in (True, False):
        scene.cache_state.state(seat, live, False)
        scene.cache_state.changed(seat, (), ask.token_keys, 0)
        assert scene.hits(ask)[seat] == 1008


def test_a_cache_that_was_cleared_leaves_no_record() -> None:
    scene, ask = Scene(), asking("x" * 4096)
    for seat in (0, 1):
        scene.sent(ask, seat)
    scene.cache_state.cleared(0)
    assert scene.hits(ask) == [0, 1008]


def test_events_of_an_engine_that_is_no_more_are_put_up_with() -> None:
    scene = Scene(engines=2)
    gone, ask = scene.cache_state.seat_of("b", 1), asking("x" * 4096, exact=True)
    assert gone is not None
    scene.sent(ask, gone)
    scene.cache_state.state(gone, True, True)
    scene.cache_state.changed(gone, ask.token_keys, (), 1024)
    scene.learn_facts(engines=1)
    assert scene.cache_state.engine_of(gone) is None
    scene.answered(ask, gone, 0, 0)
    for _ in range(10):  # until it is not trusted any more, which nobody has to be told
        scene.answered(asking("z" * 4096), gone, 512, 0)
    scene.cache_state.changed(gone, (), ask.token_keys[:5], 900)
    scene.cache_state.cleared(gone)
    scene.cache_state.state(gone, False, False)
    scene.cache_state.changed(gone, (), ask.token_keys, 0)
    assert len(scene.cache_state.exact) == 0


def test_failing_predictions_lower_the_trust_and_are_told() -> None:
    scene, ask = Scene(engines=2), asking("x" * 4096)
    seat = scene.cache_state.seat_of("b", 1)
    assert seat is not None
    log = TrustLog(scene.cache_state.engine_of, lambda: 0.0)
    scene.cache_state.trust.on_change.append(log.changed)
    with capture_logs() as logs:
        for cached in [100] * 10 + [512] * 20:
            scene.answered(ask, seat, int(512 * scene.cache_state.trust.share(seat)), cached)
    told = [(entry["log_level"], entry["event"], entry["backend"], entry["rank"]) for entry in logs]
    assert told == [("warning", "prefix_trust", "b", 1), ("info", "prefix_trust", "b", 1)]
    assert logs[0]["confirmed_share"] < 0.5 < 0.8 <= logs[1]["confirmed_share"]


def test_what_events_predicted_says_nothing_of_the_record() -> None:
    scene, ask, seat = Scene(), asking("x" * 8192, exact=True), 0
    scene.sent(ask, seat)
    scene.cache_state.state(seat, True, True)
    for _ in range(10):
        scene.answered(ask, seat, 2032, 0)
    assert scene.cache_state.trust.share(seat) == 1.0
    scene.cache_state.state(seat, False, False)
    assert scene.hits(ask)[seat] == 2032
    for _ in range(2):
        scene.answered(ask, seat, 2032, 0)
    assert scene.cache_state.trust.share(seat) == pytest.approx(0.64)
    assert scene.cache_state.index.used_bytes(seat) == 8192  # wiped, but for this prompt


def test_requests_without_usage_or_prompt_teach_nothing() -> None:
    scene = Scene()
    scene.cache_state.learn(Record("id", "chat", 0.0))
    scene.answered(Ask("m"), 0, 0, 0)
    assert scene.cache_state.index.used_bytes(0) == 0
    assert scene.cache_state.trust.share(0) == 1.0
    assert scene.cache_state.estimates.bytes_per_token("m") == 4.0
