import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.front.uploads import Upload, model_of
from gateway.resources import Holding, MemoryBudget
from tests.unit.scheduling.virtual_time import run

FILE = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n'
)
MODEL = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
END = b"--b--\r\n"


def find(pieces: list[bytes], only_model: str | None = None) -> tuple[str, bytes]:
    """The model, and what is passed on afterwards."""

    async def main() -> tuple[str, bytes]:
        upload = Upload(lambda _: None, Holding(MemoryBudget(1 << 30)))
        for piece in pieces:
            upload.feed(piece)
        upload.end()
        return await model_of(upload, only_model), b"".join([piece async for piece in upload])

    return run(main())


@given(st.lists(st.integers(0, len(MODEL + FILE + END)), max_size=6))
def test_the_model_is_found_in_any_split_and_every_byte_is_passed_on(cuts: list[int]) -> None:
    whole = MODEL + FILE + END
    edges = [0, *sorted(cuts), len(whole)]
    pieces = [whole[start:end] for start, end in pairwise(edges) if end > start]
    assert find(pieces) == ("whisper", whole)


@pytest.mark.parametrize(
    "field",
    [
        b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n',
        b"content-disposition: form-data; name=model\r\n\r\nwhisper\r\n",
        b'CONTENT-DISPOSITION: form-data; name="model"; x=y\r\nContent-Type: text/plain\r\n\r\nwhisper\r\n',
        b'Content-Disposition:form-data;name="model"\r\nA: 1\r\nB: 2\r\n\r\nwhisper\r\n',
    ],
)
def test_each_spelling_of_the_field_is_understood(field: bytes) -> None:
    assert find([FILE + b"--b\r\n" + field + END])[0] == "whisper"


@pytest.mark.parametrize("name", [b"model_x", b"xmodel", b"amodel", b"models"])
def test_a_field_with_a_similar_name_is_another_field(name: bytes) -> None:
    other = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\nwrong\r\n' % name
    assert find([other + MODEL + END])[0] == "whisper"


def test_the_name_of_the_file_is_no_field() -> None:
    with pytest.raises(InvalidRequest, match="`model` is missing") as error:
        find([FILE + END])
    assert error.value.param == "model"


def test_where_one_model_is_served_it_is_meant() -> None:
    assert find([FILE + END], "whisper") == ("whisper", FILE + END)


def test_a_model_that_comes_after_a_large_file_is_not_looked_for() -> None:
    with pytest.raises(InvalidRequest):
        find([FILE[:-2], *[b"x" * 65536] * 20, b"\r\n", MODEL, END])


def test_a_name_that_is_not_utf_8_is_no_crash() -> None:
    assert find([MODEL.replace(b"whisper", b"\xff")])[0] == "\ufffd"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"x"] * 300_000,
        [b"content-disposition:" * 50_000],
        [b"content-disposition: name=model\r\n" * 30_000],
        [b"content-disposition: name=model\r\n" + b"a:b\r\n" * 200_000],
        [(b"content-disposition: form-data; " + b"name=model;" * 22 + b"\r\n") * 4_000],
        [b"content-disposition: form-data; name=model;\r\n" * 24_000],
        [b"\ncontent-disposition:;;;" * 40_000],
    ],
    ids=["single bytes", "one long line", "many beginnings", "many headers", "many names", "many fields", "no lines"],
)
def test_no_upload_is_slow_to_look_through(pieces: list[bytes]) -> None:
    """Of these the one with many names took 1.4 s of CPU time, by a regular expression."""
    began = time.thread_time()
    with pytest.raises(InvalidRequest):
        find(pieces)
    assert time.thread_time() - began < 0.3 + 2e-6 * len(pieces)
