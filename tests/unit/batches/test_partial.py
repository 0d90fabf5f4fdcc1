"""An answer that is cut and continued, any number of times and anywhere, is the answer of an unbroken stream."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.batches.partial import PartialAnswer, StreamUnusable

PROMPT = "secret: héllo"
ALPHABET = "ab é漢🙂👩‍👧"


@dataclass(frozen=True)
class Engine:
    """Answers with a fixed text; a token is a byte of it, or a few. It decodes as engines do: text comes out at a token
    that ends a character, and if the prompt ends within one, all text of the prompt comes out with it.
    """

    pieces: Sequence[bytes]
    is_chat: bool = True

    def ids(self, pieces: Iterable[bytes]) -> list[int]:
        return [int.from_bytes(piece, "big") for piece in pieces]

    @property
    def prompt(self) -> list[int]:
        return self.ids(PROMPT.encode()[at : at + 1] for at in range(len(PROMPT.encode())))

    def stream(self, replayed: Sequence[int], groups: Iterable[int]) -> list[bytes]:
        """The events after a prompt that has so much of the answer; `groups` are the tokens of each chunk."""
        own = len(self.prompt)
        assert [*replayed] == [*self.prompt, *self.ids(self.pieces)][: len(replayed)]
        at = max(0, len(replayed) - own)
        before = PROMPT.encode() + b"".join(self.pieces[:at])
        shown = len(before) if _is_whole(before) else 0
        prompt, sent = replayed or self.prompt, at
        events = [_event(self, "", [], prompt)] if self.is_chat else []
        sizes = iter(groups)
        while at < len(self.pieces):
            end = min(len(self.pieces), at + next(sizes, 1))
            text = ""
            for number in range(at + 1, end + 1):
                until = PROMPT.encode() + b"".join(self.pieces[:number])
                if _is_whole(until):
                    text, shown = text + until[shown:].decode(), len(until)
            reason = "length" if end == len(self.pieces) else None
            shown_prompt = prompt if at == sent and not self.is_chat else None
            events.append(_event(self, text, self.ids(self.pieces[at:end]), shown_prompt, reason))
            at = end
        usage = {"prompt_tokens": len(prompt), "completion_tokens": at - sent, "total_tokens": len(prompt) + at - sent}
        return [*events, _line({"choices": [], "usage": usage, "system_fingerprint": "f"}), b"data: [DONE]\n\n"]


def _is_whole(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _line(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(event)


def _event(
    engine: Engine, text: str, ids: list[int], prompt: Sequence[int] | None, reason: str | None = None, **delta: Any
) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "stop_reason": None, "token_ids": ids or None}
    event: dict[str, Any] = {"id": "x", "created": 7, "model": "m", "choices": [choice]}
    if engine.is_chat:
        choice["delta"] = {"content": text, **delta}
        event["prompt_token_ids"] = prompt
    else:
        choice |= {"text": text, "prompt_token_ids": prompt}
    return _line(event)


def answer_of(engine: Engine, groups: Iterable[int] = ()) -> tuple[str, dict[str, Any]]:
    """Text and document of an unbroken stream."""
    partial = PartialAnswer("m", is_chat=engine.is_chat)
    partial.feed(b"".join(engine.stream([], groups)))
    document = orjson.loads(partial.body())
    choice = document["choices"][0]
    return choice["message"]["content"] if engine.is_chat else choice["text"], document


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """An answer whose tokens end anywhere in its characters."""
    raw, pieces = draw(st.text(ALPHABET, min_size=1, max_size=12)).encode(), list[bytes]()
    while raw:
        size = draw(st.integers(1, 4))
        pieces.append(raw[:size])
        raw = raw[size:]
    return Engine(pieces, draw(st.booleans()))


@given(engine=engines(), cuts=st.lists(st.floats(0, 1), max_size=6), groups=st.lists(st.integers(1, 3), max_size=30))
def test_wherever_it_is_cut_the_answer_is_the_same(engine: Engine, cuts: list[float], groups: list[int]) -> None:
    text, unbroken = answer_of(engine)
    assert text == b"".join(engine.pieces).decode()
    partial, replay = PartialAnswer("m", is_chat=engine.is_chat), list[int]()
    for cut in cuts:
        stream = b"".join(engine.stream(replay, groups))
        partial.feed(stream[: int(cut * (len(stream) - 1))])
        if partial.cut():
            replay = partial.replay()
            assert len(replay) == len(engine.prompt) + partial.tokens
        else:
            partial, replay = PartialAnswer("m", is_chat=engine.is_chat), []
    partial.feed(b"".join(engine.stream(replay, groups)))
    assert orjson.loads(partial.body()) == unbroken
    assert partial.tokens == len(engine.pieces)
    assert unbroken["usage"]["completion_tokens"] == len(engine.pieces)
    assert unbroken["usage"]["prompt_tokens"] == len(engine.prompt)


def fed(events: Iterable[bytes], *, together: bool, is_chat: bool = True) -> tuple[list[int], dict[str, Any]]:
    """The replay of an answer that is cut before its last three events, and the document of the whole."""
    *before, _, _, _ = events = [*events]
    found = []
    for part in (before, events):
        partial = PartialAnswer("m", is_chat=is_chat)
        for data in [b"".join(part)] if together else part:
            partial.feed(data)
        found.append(partial)
    return found[0].replay() if found[0].cut() else [], orjson.loads(found[1].body())


@given(engine=engines(), groups=st.lists(st.integers(1, 3), max_size=30))
def test_events_that_are_read_together_are_those_that_are_read_one_by_one(engine: Engine, groups: list[int]) -> None:
    events = engine.stream([], groups)
    one_by_one = fed(events, together=False, is_chat=engine.is_chat)
    assert fed(events, together=True, is_chat=engine.is_chat) == one_by_one


PLAIN = _event(Engine([b"a"]), "a", [97], None)
END = _line({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})


@pytest.mark.parametrize(
    "odd",
    [
        _event(Engine([b"a"]), '"],"', [98], None),
        _event(Engine([b"a"]), '","token_ids":[7]}]}\n\ndata: {"id":"x"', [98], None),
        _event(Engine([b"a"]), PLAIN.decode(), [98], None),
        _event(Engine([b"a"]), "b", [98, 99], None),
        _event(Engine([b"a"]), "", [98], None),
        _event(Engine([b"a"]), "b", [], None),
        _event(Engine([b"a"]), "b", [98], None, reasoning="why"),
        _event(Engine([b"a"]), "b", [98], None, role="assistant"),
        _event(Engine([b"a"]), "b", [98], None).replace(b'"m"', b'"other"'),
        _event(Engine([b"a"]), "b", [98], None).replace(b'"token_ids"', b'"x":[1],"token_ids"'),
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":9}}\n\n',
        b": a comment\n\n",
    ],
)
def test_an_odd_event_among_others_is_read_as_alone(odd: bytes) -> None:
    engine = Engine([b"a"])
    first, last = _event(engine, "", [], engine.prompt), _event(engine, "z", [122], None, "stop")
    events = [first, PLAIN, PLAIN, odd, PLAIN, PLAIN, last, END, b"data: [DONE]\n\n"]
    assert fed(events, together=True) == fed(events, together=False)


@pytest.mark.parametrize("ids", [b"[97,-1]", b'["a"]', b"[[97]]", b"[97"])
def test_ids_that_are_none_among_others_make_the_stream_unusable(ids: bytes) -> None:
    partial = PartialAnswer("m", is_chat=True)
    with pytest.raises(StreamUnusable):
        partial.feed(PLAIN * 3 + PLAIN.replace(b"[97]", ids) + PLAIN)


def test_tokens_without_text_are_generated_again() -> None:
    engine = Engine([b"a", *[bytes([byte]) for byte in "🙂".encode()], b"b"])
    events = engine.stream([], ())
    partial = PartialAnswer("m", is_chat=True)
    partial.feed(b"".join(events[:4]))  # the role, a letter, and half a character
    assert partial.tokens == 3
    assert partial.cut()
    assert partial.tokens == 1


def test_a_chunk_of_several_tokens_may_end_within_a_character() -> None:
    engine = Engine([b"a", b"b" + "é".encode()[:1], "é".encode()[1:]])
    partial = PartialAnswer("m", is_chat=True)
    partial.feed(b"".join(engine.stream([], [2])[:2]))
    assert not partial.cut()


def test_the_framing_of_chunks_between_events_is_passed_over() -> None:
    engine = Engine([b"a", b"b"])
    partial = PartialAnswer("m", is_chat=True)
    for event in engine.stream([], ()):
        partial.feed(b"%x\r\n%b\r\n" % (len(event), event))
    assert orjson.loads(partial.body()) == answer_of(engine)[1]


def test_before_the_first_token_nothing_is_left_of_a_cut_stream() -> None:
    partial = PartialAnswer("m", is_chat=True)
    partial.feed(Engine([b"a"]).stream([], ())[0])
    assert not partial.cut()


def test_an_engine_that_ignores_the_replayed_tokens_is_found_out() -> None:
    engine = Engine([b"a", b"b", b"c"])
    partial = PartialAnswer("m", is_chat=True)
    partial.feed(b"".join(engine.stream([], ())[:2]))
    assert partial.cut()
    with pytest.raises(StreamUnusable):
        partial.feed(engine.stream([], ())[0])


def test_without_token_ids_a_stream_is_read_and_not_continued() -> None:
    engine = Engine([b"a", b"b"])
    partial = PartialAnswer("m", is_chat=True)
    partial.feed(_event(engine, "a", [], None))
    partial.feed(_event(engine, "b", [], None, "stop"))
    partial.feed(_line({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}))
    assert orjson.loads(partial.body())["choices"][0]["message"]["content"] == "ab"
    assert not partial.cut()


def test_reasoning_is_kept_and_not_continued() -> None:
    engine = Engine([b"a", b"b"])
    partial = PartialAnswer("m", is_chat=True)
    partial.feed(_event(engine, "", [97], engine.prompt, reasoning="why"))
    partial.feed(_event(engine, "b", [98], None, "stop"))
    partial.feed(_line({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}))
    message = orjson.loads(partial.body())["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("why", "b")
    assert not partial.cut()


def test_the_cached_tokens_of_a_continued_answer_are_of_its_own_prompt() -> None:
    engine = Engine([b"a", b"b", b"c"])
    partial = PartialAnswer("m", is_chat=True)
    partial.feed(b"".join(engine.stream([], ())[:3]))
    assert partial.cut()
    *events, _, _ = engine.stream(partial.replay(), ())
    partial.feed(b"".join(events))
    own = len(engine.prompt)
    details = {"cached_tokens": own + 1}
    usage = {
        "prompt_tokens": own + 2,
        "completion_tokens": 1,
        "total_tokens": own + 3,
        "prompt_tokens_details": details,
    }
    partial.feed(_line({"choices": [], "usage": usage}))
    found = orjson.loads(partial.body())["usage"]
    assert (found["prompt_tokens"], found["completion_tokens"], found["total_tokens"]) == (own, 3, own + 3)
    assert found["prompt_tokens_details"]["cached_tokens"] == own


@pytest.mark.parametrize(
    "event",
    [
        b"data: no JSON\n\n",
        b"data: []\n\n",
        b'data: {"choices":[{"delta":{}},{"delta":{}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{}]}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[-1]}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"a"},"token_ids":["a"]}]}\n\n',
    ],
)
def test_what_cannot_be_put_together_makes_the_stream_unusable(event: bytes) -> None:
    with pytest.raises(StreamUnusable):
        PartialAnswer("m", is_chat=True).feed(event)


def test_a_stream_without_its_end_is_no_answer() -> None:
    partial = PartialAnswer("m", is_chat=True)
    partial.feed(Engine([b"a"]).stream([], ())[0])
    with pytest.raises(StreamUnusable):
        partial.body()


@pytest.mark.parametrize("is_chat", [True, False])
def test_an_event_with_many_places_for_its_text_is_searched_once(is_chat: bool) -> None:
    engine = Engine([b"a"] * 3, is_chat)
    partial = PartialAnswer("m", is_chat=is_chat)
    name = "content" if is_chat else "text"
    ignored = b'"ignored":{%b},' % b",".join([b'"%b":""' % name.encode()] * 50_000)
    for event in engine.stream([], ()):
        partial.feed(event.replace(b"{", b"{" + ignored, 1))  # a search that tries each place does not end
    assert orjson.loads(partial.body())["choices"][0]["finish_reason"] == "length"
    assert partial.tokens == 3


def test_a_stream_that_comes_in_single_bytes_is_the_same() -> None:
    engine = Engine([b"a"] * 200)
    stream = b"".join(engine.stream([], ()))
    whole = PartialAnswer("m", is_chat=True)
    whole.feed(stream)
    bytewise = PartialAnswer("m", is_chat=True)
    for at in range(len(stream)):
        bytewise.feed(stream[at : at + 1])
    assert bytewise.body() == whole.body()


def test_an_event_without_an_end_is_refused_at_its_bound() -> None:
    partial, taken_bytes = PartialAnswer("m", is_chat=True), 0
    while taken_bytes < 2097152:
        partial.feed(b"x" * 8192)
        taken_bytes += 8192
    with pytest.raises(StreamUnusable, match="exceeds the limit of 2097152 bytes"):
        partial.feed(b"x")
