"""The requests of the restart bench: a complete answer passes, and no other."""

import orjson
import pytest

from tests.bench.restarts.requests import SHARES, STREAMS, Planned, Requests, Usage, WrongAnswer, queue_ms
from tests.unit.bench.restarts.answers import answer, stream, usage, whole

KINDS = [*SHARES, "long stream"]


def planned_of(kind: str, count: int = 1) -> list[Planned]:
    requests = Requests(7)
    if kind == "long stream":
        return [requests.long(2.0) for _ in range(count)]
    made = (requests.short() for _ in range(5000))
    return [each for each in made if each.kind == kind][:count]


def test_the_same_seed_makes_the_same_requests() -> None:
    one, same, other = ([Requests(seed).short().body for _ in range(20)] for seed in (1, 1, 2))
    assert one == same != other


def test_two_loads_share_prefixes() -> None:
    one, other = ({_first_message(seed) for seed in range(begin, begin + 3)} for begin in (0, 3))
    assert not one & other  # drawn from 800
    assert all(text.startswith("prefix ") for text in one | other)


def _first_message(seed: int) -> str:
    content = orjson.loads(Requests(seed).long(1.0).body)["messages"][0]["content"]
    assert isinstance(content, str)
    return content


@pytest.mark.parametrize("kind", KINDS)
def test_only_its_own_complete_answer_passes(kind: str) -> None:
    planned, other = planned_of(kind, 2)
    right = answer(planned)
    counted = planned.check(right)
    assert counted == (Usage() if kind.startswith("embedding") else Usage(50, 32))
    wrong = [b"", right[:20], right[:-1], right.replace(b"200 OK", b"503 No")]
    if not kind.startswith("embedding"):
        wrong.append(answer(other))
    for each in wrong:
        with pytest.raises(WrongAnswer):
            planned.check(each)


@pytest.mark.parametrize("kind", sorted(STREAMS))
def test_a_stream_has_to_end_with_done_and_have_all_tokens(kind: str) -> None:
    (planned,) = planned_of(kind)
    text = orjson.dumps({"choices": [{"delta": {"content": "nonce:x"}}]})
    error = b'{"error":{"message":"interrupted"}}'
    for events, reason in (
        ((text, error), "without \\[DONE\\].*interrupted"),
        ((text, b"[DONE]"), "without usage"),
        ((text, orjson.dumps({"choices": [], "usage": usage(3)}), b"[DONE]"), "3 tokens of"),
    ):
        with pytest.raises(WrongAnswer, match=reason):
            planned.check(stream(*events))


def test_missing_embeddings_are_noticed() -> None:
    (planned,) = planned_of("embedding list")
    body = orjson.dumps({"data": [{"index": 0, "embedding": "AAAA"}]})
    with pytest.raises(WrongAnswer, match="1 embeddings of"):
        planned.check(whole(body))


def test_a_session_grows_by_answers() -> None:
    requests = Requests(3)
    lengths = []
    for _ in range(3000):
        planned = requests.short()
        if planned.kind.startswith("session"):
            lengths.append(len(orjson.loads(planned.body)["messages"]))
        planned.check(answer(planned))
    assert max(lengths) > 10


def test_the_time_in_the_queue_is_read_from_the_header() -> None:
    assert queue_ms(whole(b"{}")) == 12
    assert queue_ms(stream(b"[DONE]")) == 0
