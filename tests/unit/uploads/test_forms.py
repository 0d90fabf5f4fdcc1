"""Multipart forms, in whatever pieces they arrive."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import InvalidRequest
from gateway.features.uploads.forms import FormParser, boundary_of, content_type_of

BOUNDARY = b"xYz-17"
ACTED_ON = frozenset(("purpose", "expires_after[seconds]", "a", "model"))


def part(head: bytes, content: bytes) -> bytes:
    return b"--%b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (BOUNDARY, head, content)


def form(content: bytes, *, fields_first: bool = True) -> bytes:
    fields = part(b'name="purpose"', b"batch") + part(b'name="expires_after[seconds]"', b"3600")
    file = part(b'name="file"; filename="in \xc3\xa4.jsonl"', content)
    return (fields + file if fields_first else file + fields) + b"--%b--\r\n" % BOUNDARY


def parsed(pieces: list[bytes]) -> tuple[FormParser, bytes]:
    parser = FormParser(BOUNDARY, ACTED_ON)
    return parser, b"".join(part for piece in pieces for part in parser.feed(piece))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[start:end] for start, end in pairwise(places)]


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
    parser, found = parsed(cut(data, cuts))
    assert found == content
    known = parser.form
    assert known.is_complete
    assert known.fields == {"purpose": "batch", "expires_after[seconds]": "3600"}
    assert known.filename == "in ä.jsonl"
    for name, (start, end) in known.spans.items():
        assert data[start:end].decode() == known.fields[name]


def test_single_bytes() -> None:
    parser, found = parsed([bytes([byte]) for byte in form(b"one\r\n--two\r\n")])
    assert (found, parser.form.is_complete) == (b"one\r\n--two\r\n", True)


def test_a_form_that_was_cut_off_is_not_complete() -> None:
    parser, _ = parsed([form(b"content")[:-6]])
    with pytest.raises(InvalidRequest, match="last boundary"):
        parser.form.check_end()


def test_fields_without_a_use_are_not_kept_and_may_repeat() -> None:
    parser, _ = parsed([part(b'name="timestamp_granularities[]"', b"word" * 5000) * 3 + form(b"x")])
    assert parser.form.fields.keys() == {"purpose", "expires_after[seconds]"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (part(b'name="a"', b"x" * 5000), "exceeds 4096 bytes"),
        (part(b'name="a"', b"") * 2, "Duplicate"),
        (part(b'name="a"', b"x") + part(b"NAME=a", b"y"), "Duplicate"),
        (part(b'name="a"; filename="x"', b"x"), "must not be a file"),
        (part(b'name="a"', b"x\ny"), "one line"),
        (part(b'name="a"', b"\xff"), "one line of UTF-8"),
        (part(b'name="file"', b"") * 2, "two files"),
        (part(b'filename="x"', b""), "one name"),
        (part(b'name="x"; name="a"', b""), "one name"),
        (part(b"name=\"x\"; name*=utf-8''a", b""), "one name"),
        (part(b'name="x"; filename="; name=a"', b""), "one name"),
        (part(b"name*0=a", b""), "one name"),
        (part(b'name="x"\r\nContent-Disposition: form-data; name="a"', b""), "two Content-Disposition"),
        (b"--%b\r\nx: y\r\n\r\nz\r\n" % BOUNDARY, "one name"),
        (b"--%b\r\n%b" % (BOUNDARY, b"x" * 9000), "header size"),
        (b"--%b\r\n%b" % (BOUNDARY, b"x: y\r\n" * 9), "header count"),
        (b"--%b\r\nx: y\r\n --%b\r\n" % (BOUNDARY, BOUNDARY), "invalid character"),
        (b"--%bgarbage" % BOUNDARY, "boundary"),
        (b"preamble\r\n" + form(b""), "boundary"),
        (b"".join(part(b'name="f%d"' % number, b"") for number in range(140)), "128 fields"),
    ],
)
@pytest.mark.parametrize("step", [1, 10_000])
def test_a_form_that_is_refused(data: bytes, reason: str, step: int) -> None:
    data += b"--%b--" % BOUNDARY
    with pytest.raises(InvalidRequest, match=f"(?i){reason}"):
        parsed([data[start : start + step] for start in range(0, len(data), step)])


@pytest.mark.parametrize(
    "value",
    [
        b"multipart/form-data; boundary=xYz-17",
        b'multipart/form-data; boundary="xYz-17"',
        b"multipart/form-data;boundary=xYz-17",
        b"multipart/form-data; boundary=xYz-17; charset=utf-8",
        b"multipart/form-data; charset=UTF-8; boundary=xYz-17",
        b'Multipart/Form-Data; BOUNDARY="xYz-17"',
        b'multipart/form-data ; charset="a;b" ; Boundary = xYz-17 ',
    ],
)
def test_the_boundary_in_each_spelling_of_the_type(value: bytes) -> None:
    assert boundary_of(value) == BOUNDARY
    assert content_type_of(BOUNDARY) == b"multipart/form-data; boundary=xYz-17"


def test_a_boundary_that_is_no_token_is_quoted_for_the_backend() -> None:
    assert boundary_of(content_type_of(b"a b:c")) == b"a b:c"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"application/json",
        b"application/json; boundary=a",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; xboundary=a",
        b"multipart/form-data; boundary*=a",
        b"multipart/form-data; boundary=" + b"a" * 200,
        b'multipart/form-data; boundary="a\\"b"',
        b"multipart/form-data; boundary=a\r\nx: y",
    ],
)
def test_what_is_no_form(value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(value)
