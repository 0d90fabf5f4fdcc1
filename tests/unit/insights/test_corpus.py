import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.insights.families import MOST_PIECES_OF_A_PROMPT, build, chained, distinct
from gateway.features.insights.samples import Sample


def sample(text: bytes, model: str = "m", keys: tuple[int, ...] = (), edges: tuple[int, ...] = ()) -> Sample:
    return Sample(text, model, "", "", keys, edges, 0.0, 1, len(text), len(text) // 4)


def no_rest() -> None:
    return


TEXTS = st.lists(st.binary(max_size=400) | st.text("ab,\n", max_size=400).map(str.encode), min_size=1, max_size=6)


@given(TEXTS)
def test_pieces_are_the_whole_text(texts: list[bytes]) -> None:
    corpus = build([sample(text) for text in texts], no_rest)
    for number, text in enumerate(texts):
        rows = slice(corpus.rows[number], corpus.rows[number + 1])
        assert corpus.size[rows].sum() == len(text)
        starts = corpus.start[rows].tolist()
        assert starts == sorted(starts)
        assert (corpus.owner[rows] == number).all()


@given(TEXTS)
def test_nodes_are_the_same_as_far_as_everything_before_is(texts: list[bytes]) -> None:
    corpus = build([sample(text) for text in texts], no_rest)
    ways = [
        [tuple(corpus.content[corpus.rows[number] : row + 1]) for row in range(*corpus.rows[number : number + 2])]
        for number in range(len(texts))
    ]
    flat = [way for each in ways for way in each]
    for one, way in enumerate(flat):
        for other, its_way in enumerate(flat):
            assert (corpus.node[one] == corpus.node[other]) == (way == its_way)


def test_pieces_beyond_the_limit_of_a_prompt_are_left_out() -> None:
    corpus = build([sample(b"a," * (MOST_PIECES_OF_A_PROMPT + 1000)), sample(b"b.")], no_rest)
    assert corpus.rows.tolist() == [0, 1 + MOST_PIECES_OF_A_PROMPT, 1 + MOST_PIECES_OF_A_PROMPT + 2]


def test_what_an_older_prompt_began_with_is_matched() -> None:
    shared = b"You are a helpful assistant,\nand so on.\n"
    corpus = build([sample(shared + b"one\n"), sample(shared + b"other\n"), sample(b"else")], no_rest)
    assert corpus.matched().tolist() == [0, len(shared), 0]


def test_prompts_of_other_models_match_nothing() -> None:
    corpus = build([sample(b"abc.\n", "m"), sample(b"abc.\n", "n")], no_rest)
    assert corpus.matched().tolist() == [0, 0]
    assert corpus.content[1] == corpus.content[3]


def test_the_same_text_with_another_first_key_has_another_salt() -> None:
    text = b"x" * 200
    corpus = build([sample(text, keys=(key,), edges=(128,)) for key in (5, 6, 5)], no_rest)
    firsts = corpus.content[corpus.rows[:-1]].tolist()
    assert firsts[0] == firsts[2] != firsts[1]
    assert corpus.matched().tolist() == [0, 0, 200]


def test_quotes_commas_and_spaces_at_the_rim_make_no_difference() -> None:
    texts = b'{"a": "first", "b": "second"}', b'{"b": "second", "a": "first"}'
    one, other = (build([sample(text)], no_rest) for text in texts)
    assert one.digest.tolist() == other.digest.tolist()


def test_chains_depend_on_order() -> None:
    one, other = (chained(np.array(values, np.uint64), 0)[-1] for values in ([1, 2, 3], [2, 1, 3]))
    assert one != other


@given(st.lists(st.integers(-5, 5)))
def test_distinct_values_are_sorted(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))
