"""How long answers get and what they say."""

from loadtest.engine.choice import Choice, PreparedPrompt, find_nonce, plan_choice
from loadtest.engine.request_parameters import SamplingParams
from loadtest.engine.tokens import block_keys, namespace, tokenise


def plan(text: str, sampling: SamplingParams, limit: int = 4000, forced: int | None = None) -> Choice:
    tokens = tokenise(text)
    root = namespace("")
    prompt = PreparedPrompt(
        tokens, keys=block_keys(tokens.packed, 16, root), parent_key=root, seed=namespace(text), nonce=find_nonce(text)
    )
    return plan_choice(0, 1, prompt, sampling, limit, 16, forced)


def whole(choice: Choice) -> str:
    return choice.text(0, choice.sequence.output_tokens)


def test_the_limit_ends_an_answer_with_length() -> None:
    choice = plan("hello", SamplingParams(), limit=5)
    assert (choice.sequence.output_tokens, choice.finish_reason) == (5, "length")
    assert len(whole(choice)) == 20


def test_an_answer_ends_itself_with_a_token_that_has_no_text() -> None:
    choice = plan("hello", SamplingParams())
    tokens = choice.sequence.output_tokens
    assert choice.finish_reason == "stop"
    assert choice.text(tokens - 1, tokens) == ""
    assert len(whole(choice)) == 4 * (tokens - 1)


def test_ignore_eos_goes_on_to_the_limit() -> None:
    choice = plan("hello", SamplingParams(ignore_eos=True), limit=700)
    assert (choice.sequence.output_tokens, choice.finish_reason) == (700, "length")


def test_min_tokens_delays_the_end() -> None:
    assert plan("hello", SamplingParams(min_tokens=300)).sequence.output_tokens == 300


def test_a_stop_string_cuts_the_text_and_is_named() -> None:
    text = whole(plan("hello", SamplingParams()))
    stop = text[10:14]
    choice = plan("hello", SamplingParams(stop=(stop, "absent")))
    assert whole(choice) == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    # The token that completes the stop string is counted.
    assert choice.sequence.output_tokens == -(-(text.index(stop) + 4) // 4)


def test_the_last_nonce_of_the_prompt_is_repeated_however_short_the_answer() -> None:
    prompt = "nonce:first and nonce:second-one"
    assert whole(plan(prompt, SamplingParams(), limit=30)).startswith("nonce:second-one ")
    assert whole(plan(prompt, SamplingParams(), limit=1)) == "nonce:second-one"
    assert whole(plan(prompt, SamplingParams(), limit=3)) == "nonce:second-one"


def test_equal_prompts_get_equal_answers_and_choices_differ() -> None:
    assert whole(plan("hello", SamplingParams())) == whole(plan("hello", SamplingParams()))
    assert whole(plan("hello", SamplingParams())) != whole(plan("hello!", SamplingParams()))


def test_deltas_join_to_the_whole_text() -> None:
    choice = plan("hello nonce:abc", SamplingParams())
    tokens = choice.sequence.output_tokens
    assert "".join(choice.text(i, i + 1) for i in range(tokens)) == whole(choice)
    assert "".join(choice.token_texts(0, tokens)) == whole(choice)


def test_output_keys_continue_the_prompt_keys() -> None:
    choice = plan("p" * 128, SamplingParams(ignore_eos=True), limit=64)
    expected = block_keys(b"p" * 128 + choice.prose.packed(0, 64), 16, namespace(""))
    assert [*choice.sequence.prompt_keys, *choice.sequence.output_keys()] == expected
