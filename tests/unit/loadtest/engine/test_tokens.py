"""Tokens: prefixes, conversations, ids."""

from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine.choice import Prose
from loadtest.engine.tokens import block_keys, from_ids, namespace, render_chat, tokenise

ROOT = namespace("")


@given(st.text(), st.text())
def test_a_longer_text_begins_with_the_full_blocks_of_its_prefix(head: str, tail: str) -> None:
    if "<|im_" in head + tail:
        return
    short = block_keys(tokenise(head).packed[: len(head.encode()) // 4 * 4], 2, ROOT)
    assert block_keys(tokenise(head + tail).packed, 2, ROOT)[: len(short)] == short


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_text_survives_the_way_to_ids_and_back(text: str) -> None:
    assert from_ids(tokenise(text).ids()).text() == text


def test_four_bytes_make_a_token() -> None:
    assert tokenise("12345678").num_tokens == 2
    assert tokenise("123456789").num_tokens == 3
    assert tokenise("").num_tokens == 0


def test_keys_depend_on_adapter_and_salt_and_all_tokens_before() -> None:
    packed = tokenise("a" * 64 + "b" * 64).packed
    keys = block_keys(packed, 16, ROOT)
    assert len(keys) == 2
    assert block_keys(packed, 16, namespace("", "salt"))[0] != keys[0]
    assert block_keys(packed, 16, namespace("adapter"))[1] != keys[1]
    assert block_keys(tokenise("c" * 64 + "b" * 64).packed, 16, ROOT)[1] != keys[1]


def test_the_next_turn_begins_with_the_tokens_of_the_prompt_and_its_answer() -> None:
    turns = [("system", "Be terse."), ("user", "Hello there, how are you?")]
    prompt = tokenise(render_chat(turns)).packed
    prose = Prose(seed=5)
    later = tokenise(render_chat([*turns, ("assistant", prose.text(0, 40)), ("user", "And now?")])).packed
    assert later.startswith(prompt + prose.packed(0, 40))


def test_ids_that_do_not_fit_are_refused() -> None:
    try:
        from_ids([2**32])
    except OverflowError:
        return
    raise AssertionError("accepted")
