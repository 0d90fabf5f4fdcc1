from loadtest.recording import Logged, bytes_per_token, trace_of


def logged(at: float, ends: tuple[int, ...], hashes: str, size: int | None = None, model: str = "m") -> Logged:
    """A prompt of 4 bytes a token; each letter is the hash of one of its ends."""
    size = size or ends[-1]
    return Logged(
        at, model=model, prompt_tokens=size // 4, output_tokens=9, size_bytes=size, ends=ends, hashes=tuple(hashes)
    )


def ids(*requests: Logged, block: int = 64) -> list[list[int]]:
    return [line["hash_ids"] for line in trace_of(requests, block)]


def test_a_line_has_times_from_the_first_arrival_and_lengths() -> None:
    lines = list(trace_of([logged(1000.0, (256,), "a"), logged(1001.234, (256, 512), "ab")], 64))
    assert lines[0] == {"timestamp": 0, "input_length": 64, "output_length": 9, "hash_ids": [0]}
    assert (lines[1]["timestamp"], lines[1]["input_length"]) == (1234, 128)


def test_blocks_that_begin_alike_have_the_same_numbers() -> None:
    one, other = logged(0, (256, 512, 768), "abc"), logged(1, (256, 512, 768), "abX")
    assert ids(one, other, one) == [[0, 1, 2], [0, 1, 3], [0, 1, 2]]


def test_what_parts_before_the_next_end_is_not_shared() -> None:
    one, other = logged(0, (300, 600, 768), "abc"), logged(1, (300, 700, 768), "aXY")
    assert ids(one, other) == [[0, 1, 2], [0, 3, 4]]
    early = logged(1, (290, 600, 768), "YZW")  # it parts within bytes 256 to 300, behind the end of block 0
    assert ids(one, early) == [[0, 1, 2], [3, 4, 5]]


def test_a_partial_block_has_no_number() -> None:
    assert ids(logged(0, (256, 511), "ab")) == [[0]]


def test_the_same_hash_at_two_blocks_is_two_numbers() -> None:
    assert ids(logged(0, (1024,), "a")) == [[0, 1, 2, 3]]


def test_what_the_log_does_not_report_is_shared_with_nothing() -> None:
    long = logged(0, (256,), "a", size=768)
    assert ids(long, long) == [[0, 1, 2], [0, 3, 4]]


def test_prompts_of_one_model_are_cut_alike_whatever_their_own_ratio() -> None:
    wordy = Logged(
        0, model="m", prompt_tokens=64, output_tokens=9, size_bytes=512, ends=(256, 512), hashes=("a", "b")
    )  # 8 bytes a token
    dense = Logged(1, model="m", prompt_tokens=192, output_tokens=9, size_bytes=512, ends=(256, 512), hashes=("a", "b"))
    assert bytes_per_token([wordy, dense]) == {"m": 4.0}
    assert ids(wordy, dense) == [[0], [0, 1, 2]]


def test_models_share_nothing_and_have_ratios_of_their_own() -> None:
    other = Logged(0, model="n", prompt_tokens=64, output_tokens=9, size_bytes=64, ends=(64,), hashes=("z",))
    assert bytes_per_token([logged(0, (256,), "a"), other]) == {"m": 4.0, "n": 1.0}
    assert ids(logged(0, (256,), "a"), other) == [[0], [1]]
