import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request import Demand
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.policy import HitPredictor
from gateway.features.exact.caches import KnownBlocks
from gateway.features.exact.index import ExactIndex

KEYS = tuple(range(11, 21))
EDGES = tuple(range(400, 4001, 400))  # 4 bytes a token
TOKEN_KEYS = tuple(range(101, 160))


class Scene:
    """Two engines without KV events, and a third with them."""

    def __init__(self) -> None:
        self.index, self.hit_accuracy, self.exact = PrefixIndex([1 << 30] * 3), HitAccuracy(), ExactIndex()
        self.known_blocks = KnownBlocks(self.exact)
        self.hits = HitPredictor(self.index, self.hit_accuracy, self.known_blocks)
        self.engines = [Engine(number, "abc"[number]) for number in range(3)]

    def of(self, **fields: object) -> list[int]:
        return self.hits.predict(asking(**fields), self.engines)

    def hold(self, engine: int, blocks: int = len(KEYS)) -> None:
        self.index.record(engine, KEYS[:blocks], EDGES[:blocks])

    def distrust(self, engine: int) -> float:
        for _ in range(8):
            self.hit_accuracy.observed(engine, 1000, 0)
        return self.hit_accuracy.share(engine)


def asking(**fields: object) -> Demand:
    known = {"keys": KEYS, "edges": EDGES, "prompt_size": 4400, "prompt_tokens": 1100}
    return Demand("m", **(known | fields))  # type: ignore[arg-type]


def test_what_no_engine_holds_is_no_hit() -> None:
    assert Scene().of() == [0, 0, 0]
    assert Scene().of(keys=(), edges=()) == [0, 0, 0]


def test_a_hit_is_the_tokens_of_the_blocks_held_rounded_down_to_the_engines_blocks() -> None:
    scene = Scene()
    scene.hold(0, 1)
    scene.hold(1, 3)
    assert scene.of() == [96, 288, 0]
    scene.engines[1].block_tokens = 64
    assert scene.of() == [96, 256, 0]


@pytest.mark.parametrize(("tokens", "hit"), [(16, 0), (17, 16), (32, 16), (33, 32), (1000, 992), (1, 0)])
def test_the_last_token_of_a_repeated_prompt_is_always_computed(tokens: int, hit: int) -> None:
    scene = Scene()
    scene.hold(0)
    ask = {"prompt_size": 4000, "prompt_tokens": tokens, "anchor_size": 4000, "anchor_tokens": tokens}
    assert scene.of(**ask)[0] == hit


def test_a_request_that_uses_no_cache_has_no_hits() -> None:
    scene = Scene()
    scene.hold(0)
    assert scene.of()[0] > 0
    assert scene.of(reads_cache=False) == [0, 0, 0]


def test_engines_may_be_in_any_order_and_some_missing() -> None:
    scene = Scene()
    scene.hold(2, 2)
    scene.engines = [scene.engines[2], scene.engines[0]]
    assert scene.of() == [192, 0]


def test_an_engine_without_a_prefix_cache_has_no_hits() -> None:
    scene = Scene()
    scene.hold(0)
    scene.engines[0].caches_prefixes = False
    assert scene.of() == [0, 0, 0]


def test_an_answer_counts_where_its_prompt_and_it_are_held() -> None:
    scene = Scene()
    for engine in (0, 1):
        scene.hold(engine, 3)
    scene.index.record_answer(0, KEYS[2], 800)
    conversation = {"turn": 3, "turn_end": 5, "anchor_size": 2000, "anchor_tokens": 500}
    assert scene.of(**conversation) == [496, 288, 0]
    assert scene.of() == [288, 288, 0]  # the client left out a part of the answer
    scene.hold(0, 4)
    assert scene.of(**conversation)[0] == 496
    scene.hold(0, 7)
    assert scene.of(**conversation)[0] == 688


def test_the_last_token_of_an_answer_is_not_in_the_cache() -> None:
    scene = Scene()
    scene.hold(0, 3)
    scene.index.record_answer(0, KEYS[2], 800)
    for tokens, hit in ((512, 496), (513, 512)):
        assert scene.of(turn=3, turn_end=5, anchor_size=2000, anchor_tokens=tokens)[0] == hit


def test_a_longer_prompt_takes_the_place_of_the_answer_that_it_contains() -> None:
    scene = Scene()
    scene.hold(0, 3)
    scene.index.record_answer(0, KEYS[2], 800)
    used = scene.index.used_bytes(0)
    scene.hits.placed(asking(turn=3, turn_end=5), scene.engines[0])
    assert scene.index.answered(KEYS[2]) == 0
    assert scene.index.used_bytes(0) == used - 800 + 7 * 400
    assert scene.of()[0] == 992


def test_predictions_that_failed_are_believed_as_far_as_they_are_confirmed() -> None:
    scene = Scene()
    scene.hold(0)
    scene.hold(1)
    share = scene.distrust(0)
    assert scene.of()[:2] == [int(1000 * share) // 16 * 16, 992]


def test_kv_events_are_used_instead_of_the_record() -> None:
    scene = Scene()
    for engine in range(3):
        scene.hold(engine)
        scene.distrust(engine)
    scene.exact.update(2, TOKEN_KEYS[:20], ())
    scene.exact.set_live(2, True)
    own = scene.of()
    assert own[2] == own[0] < 992
    assert scene.of(token_keys=TOKEN_KEYS) == [own[0], own[1], 320]
    scene.exact.update(2, (), TOKEN_KEYS[5:6])
    assert scene.of(token_keys=TOKEN_KEYS)[2] == 80
    scene.exact.set_live(2, False)
    assert scene.of(token_keys=TOKEN_KEYS) == own


def test_an_exact_hit_leaves_the_last_token_to_be_computed_too() -> None:
    scene = Scene()
    scene.exact.update(0, TOKEN_KEYS[:20], ())
    scene.exact.set_live(0, True)
    assert scene.of(token_keys=TOKEN_KEYS[:20], prompt_tokens=320)[0] == 304
    assert scene.of(token_keys=TOKEN_KEYS[:20], prompt_tokens=321)[0] == 320


def test_what_was_just_sent_counts_until_events_report_it() -> None:
    scene, ask = Scene(), asking(token_keys=TOKEN_KEYS[:30])
    scene.exact.update(0, TOKEN_KEYS[:5], ())
    for engine in (0, 1):
        scene.exact.set_live(engine, True)
    for engine, hit in ((0, 480), (1, 480)):
        scene.hits.placed(ask, scene.engines[engine])
        assert scene.of(token_keys=TOKEN_KEYS)[engine] == hit
    for engine in (0, 1):  # it came, and half of it is gone again
        scene.exact.update(engine, TOKEN_KEYS[:15], ())
        scene.known_blocks.pending.reported(engine, TOKEN_KEYS[:30])
    assert scene.of(token_keys=TOKEN_KEYS)[:2] == [240, 240]


def test_what_is_on_its_way_may_fill_a_hole_in_what_is_held() -> None:
    scene = Scene()
    scene.exact.update(0, TOKEN_KEYS[:5] + TOKEN_KEYS[8:20], ())
    scene.exact.set_live(0, True)
    assert scene.of(token_keys=TOKEN_KEYS)[0] == 80
    scene.hits.placed(asking(token_keys=TOKEN_KEYS[:8]), scene.engines[0])
    assert scene.of(token_keys=TOKEN_KEYS)[0] == 320
    assert scene.of(token_keys=TOKEN_KEYS[:7])[0] == 112


def test_nothing_is_pending_on_an_engine_without_events() -> None:
    scene = Scene()
    scene.exact.set_live(1, True)
    scene.hits.placed(asking(token_keys=TOKEN_KEYS), scene.engines[0])
    scene.hits.placed(asking(), scene.engines[1])
    assert not scene.known_blocks.pending


def test_without_exact_blocks_token_keys_are_of_no_use() -> None:
    scene = Scene()
    scene.hold(0, 1)
    assert HitPredictor(scene.index, scene.hit_accuracy).predict(asking(token_keys=TOKEN_KEYS), scene.engines) == [
        96,
        0,
        0,
    ]


@given(
    held=st.lists(st.integers(0, len(KEYS)), min_size=3, max_size=3),
    tokens=st.integers(1, 3000),
    anchor=st.integers(0, 10),
    anchor_tokens=st.integers(1, 3000),
    block=st.sampled_from([1, 16, 48, 128]),
    failed=st.booleans(),
)
def test_a_hit_is_whole_blocks_of_less_than_the_prompt_and_grows_with_what_is_held(
    held: list[int], tokens: int, anchor: int, anchor_tokens: int, block: int, failed: bool
) -> None:
    scene = Scene()
    for engine, blocks in enumerate(held):
        scene.hold(engine, blocks)
        scene.engines[engine].block_tokens = block
        if failed:
            scene.distrust(engine)
    size = EDGES[anchor - 1] if anchor else 0
    hits = scene.of(prompt_tokens=tokens, anchor_size=size, anchor_tokens=min(tokens, anchor_tokens) if anchor else 0)
    assert all(0 <= hit < tokens and hit % block == 0 for hit in hits)
    ordered = sorted(range(3), key=lambda engine: held[engine])
    assert [hits[engine] for engine in ordered] == sorted(hits)
