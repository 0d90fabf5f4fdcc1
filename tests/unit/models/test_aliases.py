"""Which model an alias stands for: of several, each conversation keeps the one that it got."""

from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import InvalidRequest
from gateway.core.front.read import RequestReader
from gateway.core.request import InferenceRequest, Kind, ModelChoice
from gateway.core.turns import at_once
from gateway.features.keys.settings import KeyConfig
from gateway.features.models.aliases import Aliases, Canary, opening_of
from gateway.features.models.settings import ModelsConfig
from gateway.features.responses.stored import Place, StoredResponses
from tests.unit.front.test_read import ISOLATED, SHARED, read, reader_of

CHAT = b"/v1/chat/completions"
SYSTEM, HELLO = {"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hello."}
LATER = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Why?"}]
CANARY = {"aliases": {"gpt": {"old": 95, "new": 5}, "half": {"old": 1, "new": 1}}}


def canary_reader(stored: StoredResponses | None = None) -> RequestReader:
    return reader_of(ModelsConfig.model_validate(CANARY), stored)


def ask(*turns: dict[str, str], model: str = "half", path: bytes = CHAT, **more: Any) -> InferenceRequest:
    fields = {"model": model} | ({"messages": list(turns)} if turns else {}) | more
    headers, key = fields.pop("headers", None), fields.pop("key", None)
    return read(fields, path, through=fields.pop("through", None) or canary_reader(), headers=headers, key=key)


def test_each_model_gets_its_share_of_the_conversations() -> None:
    found = Counter(
        ask(SYSTEM, {"role": "user", "content": f"Question {number}"}, model="gpt").demand.model
        for number in range(4000)
    )
    assert found.total() == 4000
    assert 120 < found["new"] < 280


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 100), min_size=1), st.floats(0, 1, exclude_max=True))
def test_a_canary_has_a_model_for_every_place(weights: dict[str, float], place: float) -> None:
    weights["always"] = 1.0
    assert weights[Canary(weights).choose(place)] > 0


def test_other_weights_move_only_conversations_near_the_limit() -> None:
    before, after = Canary({"old": 95, "new": 5}), Canary({"old": 90, "new": 10})
    moved = [number for number in range(100) if before.choose(number / 100) != after.choose(number / 100)]
    assert moved == [90, 91, 92, 93, 94]


def test_all_turns_of_a_conversation_go_to_one_model() -> None:
    for number in range(50):
        first = [SYSTEM, {"role": "user", "content": str(number)}]
        models = {ask(*first).demand.model, ask(*first, *LATER).demand.model, ask(*first, *LATER, *LATER).demand.model}
        assert len(models) == 1


@pytest.mark.parametrize(
    "name", [{"headers": {b"x-session-id": b"s-1"}}, {"prompt_cache_key": "s-1"}], ids=["header", "field"]
)
def test_a_session_keeps_its_model_whatever_is_asked(name: dict[str, Any]) -> None:
    models = {ask({"role": "user", "content": str(number)}, **name).demand.model for number in range(20)}
    assert len(models) == 1


def test_tenants_and_aliases_are_independent() -> None:
    aliases = Aliases(CANARY["aliases"])  # type: ignore[arg-type]
    document = {"messages": [HELLO]}
    found = {aliases.model_of("half", str(tenant), "", Kind.GENERATE, document) for tenant in range(20)}
    assert found == {"old", "new"}


@pytest.mark.parametrize(
    ("document", "kind", "opening"),
    [
        ({"messages": [SYSTEM, HELLO, *LATER]}, Kind.GENERATE, orjson.dumps([SYSTEM, HELLO]).decode()),
        ({"messages": [SYSTEM]}, Kind.LIGHT, orjson.dumps([SYSTEM]).decode()),
        ({"messages": [[HELLO, *LATER], [SYSTEM]]}, Kind.GENERATE, orjson.dumps([[HELLO, *LATER]]).decode()),
        ({"input": [HELLO, *LATER]}, Kind.GENERATE, orjson.dumps([HELLO]).decode()),
        ({"input": "x" * 5000}, Kind.GENERATE, "x" * 1024),
        ({"prompt": ["a" * 2000, "b"]}, Kind.GENERATE, orjson.dumps(["a" * 1024]).decode()),
        ({"prompt": [3, 4, 5]}, Kind.GENERATE, "[3]"),
        ({"prompt": [[3, 4, 5], [6]]}, Kind.GENERATE, "[[3,4,5]]"),
        ({"messages": [None, 7]}, Kind.GENERATE, "[null]"),
        ({"messages": 7, "prompt": "p"}, Kind.GENERATE, "p"),
        ({"input": "p"}, Kind.POOL, ""),
        ({}, Kind.GENERATE, ""),
    ],
)
def test_what_all_turns_begin_with(document: dict[str, Any], kind: Kind, opening: str) -> None:
    assert opening_of(document, kind) == opening


def test_the_embeddings_of_a_client_come_from_one_model() -> None:
    models = {ask(path=b"/v1/embeddings", input=str(number)).demand.model for number in range(20)}
    assert len(models) == 1


def test_a_stored_response_is_continued_by_its_own_model() -> None:
    stored = StoredResponses()
    for model in ("old", "new", "other"):
        stored.remember(b'{"id":"resp_%b"}' % model.encode(), Place("b", model, ("", "")))
    through = canary_reader(stored)
    found = [
        ask(path=b"/v1/responses", input="x", previous_response_id=f"resp_{model}", through=through).demand.model
        for model in ("old", "new")
    ]
    assert found == ["old", "new"]


def test_a_response_is_stored_with_the_name_that_its_client_used() -> None:
    stored = StoredResponses()
    request = ask(path=b"/v1/responses", input="x", through=canary_reader(stored))
    assert request.on_opening is not None
    request.on_opening("b", b'{"id":"resp_1"}')
    assert stored.find("resp_1", ("", "")) == Place("b", request.demand.model, ("", ""), alias="half")


FALLBACKS = {"aliases": {"gpt": "m"}, "m": {"fallback": ["n", "o"]}}


def fallback_reader() -> RequestReader:
    return reader_of(ModelsConfig.model_validate(FALLBACKS))


def choice_of(request: InferenceRequest) -> ModelChoice:
    assert request.model_choice is not None
    return request.model_choice


def test_a_request_knows_what_may_take_the_place_of_its_model() -> None:
    through = fallback_reader()
    choice = choice_of(ask(HELLO, model="gpt", through=through))
    assert (choice.alias, choice.fallbacks) == ("gpt", ("n", "o"))
    assert choice_of(ask(HELLO, model="m", through=through)).fallbacks == ("n", "o")
    assert ask(HELLO, model="n", through=through).model_choice is None


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/v1/rerank", b"/tokenize"])
def test_only_what_generates_has_fallbacks(path: bytes) -> None:
    fields: dict[str, Any] = {"input": "x", "query": "q", "documents": ["d"], "prompt": "p"}
    assert ask(model="m", path=path, through=fallback_reader(), **fields).model_choice is None
    assert choice_of(ask(model="gpt", path=path, through=fallback_reader(), **fields)) == ModelChoice("gpt")


def test_a_client_can_refuse_fallbacks() -> None:
    none = {b"x-gateway-fallback": b" None"}
    assert ask(HELLO, model="m", through=fallback_reader(), headers=none).model_choice is None
    assert choice_of(ask(HELLO, model="gpt", through=fallback_reader(), headers=none)) == ModelChoice("gpt")
    with pytest.raises(InvalidRequest, match="X-Gateway-Fallback must be none"):
        ask(HELLO, model="m", through=fallback_reader(), headers={b"x-gateway-fallback": b"no"})


def test_a_key_falls_back_only_to_models_of_its_allow_list() -> None:
    through = fallback_reader()
    for allowed, fallbacks in {("gpt", "o"): ("o",), ("gpt", "n*"): ("n",), ("*",): ("n", "o"), ("gpt",): ()}.items():
        key = KeyConfig(name="ann", key="ann", models=allowed)
        assert choice_of(ask(HELLO, model="gpt", through=through, key=key)).fallbacks == fallbacks
    assert (
        ask(HELLO, model="m", through=through, key=KeyConfig(name="bob", key="b", models=("m",))).model_choice is None
    )


def test_what_continues_a_stored_response_has_no_fallback() -> None:
    stored = StoredResponses()
    stored.remember(b'{"id":"resp_1"}', Place("b", "m", ("", "")))
    through = reader_of(ModelsConfig.model_validate(FALLBACKS), stored)
    asked = ask(path=b"/v1/responses", model="m", input="x", previous_response_id="resp_1", through=through)
    assert asked.model_choice is None


@pytest.mark.parametrize("key", [None, SHARED, ISOLATED])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"max_tokens": 3, "cache_salt": "s", "n": 2}])
def test_a_request_for_another_model_is_what_it_would_have_been(more: dict[str, Any], key: Any) -> None:
    through = fallback_reader()
    request = ask(SYSTEM, HELLO, model="gpt", through=through, key=key, **more)
    remade = choice_of(request).remade
    assert remade is not None
    made, wanted = at_once(remade(request, "n")), ask(SYSTEM, HELLO, model="n", through=through, key=key, **more)
    assert orjson.loads(made.body) == orjson.loads(wanted.body)
    assert made.demand == wanted.demand
    for name in ("target", "headers", "done_marker", "hides_usage", "repeatable", "salt", "request_id"):
        assert getattr(made, name) == getattr(wanted, name)
    assert made.demand.keys != request.demand.keys
