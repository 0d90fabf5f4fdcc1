"""Multipart forms, in whatever pieces they arrive."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.multipart import FormParser, boundary_of
from gateway.errors import InvalidRequest

BOUNDARY = b"xYz-17"


def part(head: bytes, content: bytes) -> bytes:
    return b"--%b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (BOUNDARY, head, content)


def form(content: bytes, *, fields_first: bool = True) -> bytes:
    fields = part(b'name="purpose"', b"batch") + part(b'name="expires_after[seconds]"', b"3600")
    file = part(b'name="file"; filename="in \xc3\xa4.jsonl"', content)
    return (fields + file if fields_first else file + fields) + b"--%b--\r\n" % BOUNDARY


def parsed(pieces: list[bytes]) -> tuple[FormParser, bytes]:
    parser = FormParser(BOUNDARY)
    return parser, b"".join(part for piece in pieces for part in parser.feed(piece))


CONTENTS = st.lists(
    st.sampled_from([b"\r\n", b"--", BOUNDARY, b"\r\n--" + BOUNDARY[:3], b"{}", b"\n", b"\r", b"a", b"\0"]), max_size=12
).map(b"".join)


@settings(deadline=None)
@given(content=CONTENTS, cuts=st.lists(st.integers(0, 400), max_size=8), fields_first=st.booleans())
def test_the_content_is_the_same_in_whatever_pieces_it_arrives(
    content: bytes, cuts: list[int], fields_first: bool
) -> None:
    if b"\r\n--" + BOUNDARY in b"\r\n" + content + b"\r":
        return  # a client chooses a boundary that the content does not have
    data = form(content, fields_first=fields_first)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parser, found = parsed([data[start:end] for start, end in pairwise(places)])
    assert found == content
    assert parser.is_complete
    assert parser.fields == {"purpose": "batch", "expires_after[seconds]": "3600"}
    assert parser.filename == "in ä.jsonl"


def test_single_bytes() -> None:
    parser, found = parsed([bytes([byte]) for byte in form(b"one\r\n--two\r\n")])
    assert (found, parser.is_complete) == (b"one\r\n--two\r\n", True)


def test_a_form_that_was_cut_off_is_not_complete() -> None:
    parser, _ = parsed([form(b"content")[:-6]])
    assert not parser.is_complete


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (part(b'name="a"', b"x" * 5000), "exceeds 4096 bytes"),
        (part(b'name="a"', b"") * 2, "Duplicate"),
        (part(b'name="file"', b"") * 2, "two files"),
        (part(b"", b""), "no name"),
        (b"--%b\r\n%b" % (BOUNDARY, b"x" * 9000), "head of a part"),
        (b"--%bgarbage" % BOUNDARY, "other text"),
        (b"".join(part(b'name="f%d"' % number, b"") for number in range(40)), "32 fields"),
    ],
)
def test_a_form_that_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parsed([data])


@pytest.mark.parametrize("quoted", [b'"%b"' % BOUNDARY, BOUNDARY, b"%b; charset=utf-8" % BOUNDARY])
def test_the_boundary(quoted: bytes) -> None:
    assert boundary_of(b"multipart/form-data; boundary=%b" % quoted) == BOUNDARY


@pytest.mark.parametrize("value", [b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary="])
def test_what_is_no_form(value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(value)
