"""What is known of a conversation's next turn, from what engines said of the turns before."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Config
from gateway.core.backends.settings import BackendConfig
from gateway.core.feedback import Learning
from gateway.core.front.read import MEDIA_TOKENS
from gateway.core.request import Demand, Usage
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Estimates
from gateway.core.routing.policy import HitPredictor
from gateway.core.routing.prompt_blocks import LONGEST_BYTES
from tests.unit.front.readers import request_reader
from tests.unit.front.wires import Sent

BLOCK = 16
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
Turn = dict[str, Any]


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Turn:
    return {"role": "assistant", "content": text} | more


def floor(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


class Scene:
    """Three engines; each request is placed where the test says, and learned from when it is answered."""

    def __init__(self) -> None:
        self.estimates, self.index, accuracy = Estimates(), PrefixIndex([1 << 30] * 3), HitAccuracy()
        self.hits = HitPredictor(self.index, accuracy)
        self.learning = Learning(self.estimates, self.index, accuracy)
        self.engines = [Engine(number, "abc"[number], block_tokens=BLOCK) for number in range(3)]
        config = Config(backends=(BackendConfig(url="http://10.0.0.1:8000"),))
        self.reader = request_reader(config, self.estimates)

    def ask(self, *turns: Turn, path: bytes = b"/v1/chat/completions", **fields: Any) -> Demand:
        body = orjson.dumps({"model": "m"} | ({"messages": turns} if turns else {}) | fields)
        incoming = Sent(path, body).incoming()
        assert incoming.route is not None
        return self.reader.read(incoming, incoming.route, "id", lambda: None).demand

    def answer(self, ask: Demand, engine: int, prompt: int, completion: int) -> None:
        self.hits.placed(ask, self.engines[engine])
        self.learning.answered(ask, engine, 0, Usage(prompt, completion))

    def predicted(self, ask: Demand) -> list[int]:
        return self.hits.predict(ask, self.engines)


FIRST = (user("Tell me all about it, " * 20),)
REPLY = "It is like this. " * 40  # 680 bytes, 170 tokens at 4 bytes each
SECOND = (*FIRST, assistant(REPLY), user("Go on."))


@pytest.mark.parametrize("opening", [{}, {"system": "You are brief. " * 10}, {"tools": [{"name": "f" * 300}]}])
@pytest.mark.parametrize(("prompt", "completion"), [(137, 170), (150, 151), (200, 161), (120, 129)])
def test_the_next_turn_is_predicted_to_the_block_where_the_turn_before_was_answered(
    prompt: int, completion: int, opening: dict[str, Any]
) -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST, **opening), 1, prompt, completion)
    ask = scene.ask(*SECOND, **opening)
    # The last token that an engine samples is not in its cache.
    assert scene.predicted(ask) == [0, floor(prompt + completion - 1), 0]
    assert ask.anchor_tokens == prompt + completion
    assert prompt + completion < ask.prompt_tokens < prompt + completion + 20


@settings(deadline=None)
@given(prompt=st.integers(100, 200), completion=st.integers(160, 300))
def test_whatever_the_engine_counts_the_prediction_is_its_count(prompt: int, completion: int) -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST), 0, prompt, completion)
    assert scene.predicted(scene.ask(*SECOND))[0] == floor(prompt + completion - 1)


def test_elsewhere_only_what_was_sent_there_is_predicted() -> None:
    scene = Scene()
    system = user("Rules. " * 200)
    scene.answer(scene.ask(system, user("Other question")), 2, 360, 50)
    scene.answer(scene.ask(system, *FIRST), 0, 480, 170)
    ask = scene.ask(system, *SECOND)
    shared = next(place for place, edge in enumerate(ask.edges, 1) if edge >= len("\x1euser\x1f") + 1400)
    assert scene.predicted(ask) == [floor(480 + 170 - 1), 0, floor(ask.tokens_of(shared))]
    assert 330 <= ask.tokens_of(shared) <= 370


def test_a_third_turn_builds_on_the_second() -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST), 0, 130, 170)
    second = scene.ask(*SECOND)
    scene.answer(second, 0, 310, 175)
    third = scene.ask(*SECOND, assistant(REPLY), user("And then?"))
    assert scene.predicted(third) == [floor(310 + 175 - 1), 0, 0]
    assert scene.index.answered(second.keys[second.turn - 1]) == 0  # the second turn's blocks stand for it


def test_a_second_turn_that_went_elsewhere_leaves_the_first_answer_where_it_was() -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST), 0, 130, 170)
    scene.answer(scene.ask(*SECOND), 1, 310, 175)
    branch = scene.ask(*FIRST, assistant(REPLY), user("Something else."))
    assert scene.predicted(branch) == [floor(130 + 170 - 1), floor(130 + 170), 0]


@pytest.mark.parametrize("stripped", [assistant("It is."), assistant(""), {"role": "assistant", "content": None}])
def test_an_answer_of_which_the_client_left_out_a_part_is_not_counted(stripped: Turn) -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST), 0, 130, 1700)
    ask = scene.ask(*FIRST, stripped, user("Go on."))
    assert (ask.turn, ask.turn_end) == (0, 0)
    assert scene.predicted(ask) == [floor(130), 0, 0]
    assert ask.prompt_tokens < 200


def test_an_answer_that_was_made_longer_is_not_counted_either() -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST), 0, 130, 20)
    ask = scene.ask(*SECOND)
    assert scene.predicted(ask) == [floor(130), 0, 0]


@pytest.mark.parametrize("prompt", [16, 17, 129, 130, 144, 145, 1000])
def test_an_exact_repeat_finds_all_but_the_last_tokens_block(prompt: int) -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST), 2, prompt, 50)
    ask = scene.ask(*FIRST)
    assert ask.prompt_tokens == prompt
    assert scene.predicted(ask) == [0, 0, floor(prompt - 1)]


def test_a_turn_that_is_asked_again_finds_the_answer_before_it_where_that_is() -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST), 0, 130, 170)
    scene.answer(scene.ask(*SECOND), 1, 310, 175)
    again = scene.ask(*SECOND)
    assert again.prompt_tokens == 310
    hits = scene.predicted(again)
    assert hits[1] == floor(309)
    assert floor(130) < hits[0] <= floor(310)


def test_tool_calls_are_an_answer_too() -> None:
    scene = Scene()
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{}" * 100}}
    scene.answer(scene.ask(*FIRST), 0, 130, 80)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "found"}
    ask = scene.ask(*FIRST, {"role": "assistant", "content": None, "tool_calls": [call]}, result)
    assert scene.predicted(ask) == [floor(130 + 80 - 1), 0, 0]


def test_several_choices_teach_nothing_of_the_conversation() -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST, n=2), 0, 130, 340)
    assert scene.ask(*SECOND).anchor_size == 0


def test_a_conversation_that_begins_with_an_answer_has_nothing_before_it() -> None:
    ask = Scene().ask(assistant("Hello."), user("Hi."))
    assert (ask.turn, ask.turn_end) == (0, 0)


def test_token_ids_are_counted_not_guessed() -> None:
    scene = Scene()
    ids = list(range(1000, 1500))
    scene.answer(scene.ask(path=b"/v1/completions", prompt=ids), 0, 500, 20)
    ask = scene.ask(path=b"/v1/completions", prompt=[*ids, *range(100)])
    assert ask.prompt_tokens == 600
    assert ask.learnable_bytes == 0
    assert floor(500) - 64 <= scene.predicted(ask)[0] <= 500
    assert scene.predicted(scene.ask(path=b"/v1/completions", prompt=ids))[0] == floor(499)


def test_an_image_that_an_engine_has_counted_is_not_guessed_any_more() -> None:
    scene = Scene()
    turn = {"role": "user", "content": [{"type": "text", "text": "What is this? " * 20}, PICTURE]}
    ask = scene.ask(turn)
    assert ask.prompt_tokens > MEDIA_TOKENS
    scene.answer(ask, 0, 400, 170)
    assert scene.ask(turn).prompt_tokens == 400
    following = scene.ask(turn, assistant(REPLY), user("Go on."))
    assert 570 < following.prompt_tokens < 600
    assert scene.predicted(following)[0] == floor(569)


def test_usage_without_a_prompt_teaches_nothing() -> None:
    scene = Scene()
    scene.answer(scene.ask(*FIRST), 0, 0, 5)
    ask = scene.ask(*FIRST)
    assert ask.prompt_tokens == ask.prompt_size // 4
    assert scene.predicted(ask)[0] > 0


def test_the_length_of_a_text_longer_than_its_keys_is_not_used_for_another() -> None:
    scene = Scene()
    text = "x" * LONGEST_BYTES
    scene.answer(scene.ask(path=b"/v1/completions", prompt=text + "y" * 4_000_000), 0, 1_500_000, 5)
    ask = scene.ask(path=b"/v1/completions", prompt=text + "z")
    assert ask.anchor_size == 0
    assert 400_000 < ask.prompt_tokens < 600_000


TURNS = st.lists(st.text(alphabet="abc ", min_size=0, max_size=300), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    texts=TURNS,
    counts=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 200)), min_size=6, max_size=6),
    engines=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_tokens_grow_with_blocks_and_never_exceed_the_prompt_however_odd_the_counts(
    texts: list[str], counts: list[tuple[int, int]], engines: list[int]
) -> None:
    scene = Scene()
    turns: list[Turn] = []
    for text, (prompt, completion), engine in zip(texts, counts, engines, strict=False):
        turns.append(user(text))
        ask = scene.ask(*turns)
        tokens = [ask.tokens_of(blocks) for blocks in range(len(ask.keys) + 1)]
        assert tokens == sorted(tokens)
        assert tokens[-1] <= ask.prompt_tokens
        assert 0 <= ask.turn <= ask.turn_end <= len(ask.keys)
        assert ask.edges[-1] == ask.prompt_size
        hits = scene.predicted(ask)
        assert all(0 <= hit < ask.prompt_tokens and hit % BLOCK == 0 for hit in hits)
        scene.answer(ask, engine, prompt, completion)
        turns.append(assistant(text))
