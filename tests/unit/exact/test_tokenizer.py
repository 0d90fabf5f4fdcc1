from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.features.exact.conversation import NotUnderstood, PromptFeature
from gateway.features.exact.tokenizer import CannotLoad, ModelTokenizer
from tests.unit.exact.models import END, START

EVERY = [feature.value for feature in PromptFeature]
CACHE_BYTES = 1 << 20
KINDS = ["bytes", "parts", "pieces", "left", "bare"]
TEXTS = st.lists(
    st.one_of(st.text(), st.sampled_from([START, END, START[:-1], "|>", " ", "\n", "<s>", "user\n", "e\u0301"]))
).map("".join)


@pytest.fixture(scope="module")
def loaded(folders: dict[str, str]) -> dict[str, ModelTokenizer]:
    return {kind: ModelTokenizer(folder, CACHE_BYTES) for kind, folder in folders.items()}


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **more}


def ids(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


def whole(model: ModelTokenizer, text: str, special: bool) -> list[int]:
    """The same text by the library's own front door."""
    return list(model._tokenizer(text, add_special_tokens=special)["input_ids"])


def pieces_encoded_by(model: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills while the model is used."""
    encoded, encode = list[str](), model.segments._encode

    def encoding(texts: list[str]) -> list[bytes]:
        encoded.extend(texts)
        return encode(texts)

    monkeypatch.setattr(model.segments, "_encode", encoding)
    return encoded


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, special=st.booleans())
def test_a_text_has_the_tokens_that_the_library_gives_it(
    loaded: dict[str, ModelTokenizer], kind: str, text: str, special: bool
) -> None:
    model = loaded[kind]
    tokens = model.tokens("completions", {"prompt": text, "add_special_tokens": special}, "string", EVERY)
    assert ids(tokens) == whole(model, text, special)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=1, max_size=5), special=st.booleans())
def test_each_of_several_texts_has_as_many_tokens_as_it_has_alone(
    loaded: dict[str, ModelTokenizer], kind: str, texts: list[str], special: bool
) -> None:
    model = loaded[kind]
    assert model.counts(texts, special=special) == [len(whole(model, text, special)) for text in texts]


@pytest.mark.parametrize("kind", ["bytes", "pieces", "left"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(TEXTS, min_size=1, max_size=5), special=st.booleans())
def test_a_conversation_has_the_tokens_of_its_template_whatever_was_encoded_before(
    loaded: dict[str, ModelTokenizer], kind: str, turns: list[str], special: bool
) -> None:
    model = loaded[kind]
    for length in range(1, len(turns) + 1):
        document = chat(*turns[:length], add_special_tokens=special)
        text = model._tokenizer.apply_chat_template(document["messages"], tokenize=False, add_generation_prompt=True)
        assert ids(model.tokens("chat", document, "string", EVERY)) == whole(model, text, special)


def test_only_a_conversations_new_turn_is_encoded(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelTokenizer(folder, CACHE_BYTES)
    model.tokens("chat", chat("One.", "Two."), "string", EVERY)
    encoded = pieces_encoded_by(model, monkeypatch)
    model.tokens("chat", chat("One.", "Two.", "Three."), "string", EVERY)
    assert model.segmented
    assert encoded == [f"{START}user\nThree."], "the end of a turn is a piece that is known already"


def test_a_token_that_eats_what_stands_before_it_is_no_place_to_cut(
    loaded: dict[str, ModelTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = pieces_encoded_by(loaded["left"], monkeypatch)
    loaded["left"].tokens("chat", chat("One for this test  ", "Two\n\n"), "string", EVERY)
    assert encoded[0] == f"{START}user\nOne for this test  {END}\n", "it is cut at the starts of turns alone"


def test_variables_reach_the_template_and_the_document_stays_as_it_is(folder: str) -> None:
    model = ModelTokenizer(folder, CACHE_BYTES)
    document = chat("Hi", add_generation_prompt=False)
    shorter = model.tokens("chat", document, "string", EVERY)
    assert model.tokens("chat", chat("Hi"), "string", EVERY).startswith(shorter)
    assert len(shorter) < len(model.tokens("chat", chat("Hi"), "string", EVERY))
    assert document == chat("Hi", add_generation_prompt=False)


def test_a_template_that_refuses_makes_a_prompt_unknown(loaded: dict[str, ModelTokenizer]) -> None:
    document = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}
    with pytest.raises(NotUnderstood, match="no system turns"):
        loaded["parts"].tokens("chat", document, "openai", EVERY)


def test_without_a_template_only_texts_are_tokenized(loaded: dict[str, ModelTokenizer]) -> None:
    assert loaded["bare"].tokens("completions", {"prompt": "Hi"}, "string", EVERY)
    with pytest.raises(NotUnderstood):
        loaded["bare"].tokens("chat", chat("Hi"), "string", EVERY)


def test_a_feature_that_is_not_verified_is_refused(folder: str) -> None:
    model = ModelTokenizer(folder, CACHE_BYTES)
    with pytest.raises(NotUnderstood, match="completion"):
        model.tokens("completions", {"prompt": "Hi"}, "string", [PromptFeature.CHAT])


@pytest.mark.parametrize("broken", [None, "{}", "not json"])
def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path, broken: str | None) -> None:
    if broken is not None:
        (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(CannotLoad, match="cannot be loaded"):
        ModelTokenizer(str(tmp_path), CACHE_BYTES)
