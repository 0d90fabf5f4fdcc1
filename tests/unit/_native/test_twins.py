"""The functions of the extension return what those in Python return, for any input."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway._native import pure
from gateway.core.front.http_request import KNOWN_HEADERS, HttpRequest
from tests.unit._native.kernel_build import built_kernel

kernel: Any = built_kernel()
BUILDS = [pure] if kernel is None else [pure, kernel]
compiled = pytest.mark.skipif(kernel is None, reason="there is no C compiler, or no Python.h")

TEXT = st.text(max_size=12) | st.sampled_from(['"', "\\", '\\"', "\\\\", "{", "}]", ":", '":"', "assistant", "é", "😀"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
JSON_TEXTS = st.builds(
    lambda document, ascii_only, indent: json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode(),
    st.dictionaries(TEXT, VALUES, max_size=5), st.booleans(), st.sampled_from([None, 1, "\t"]),
)  # fmt: skip
MARKS = st.lists(st.sampled_from([b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b"a", b"\x00"]), max_size=40)
BODIES = JSON_TEXTS | MARKS.map(b"".join) | st.binary(max_size=64)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return type(error)


@compiled
@given(BODIES, st.integers(0, 6))
@example(b'{"' + b"\\" * 4097 + b'":', 1)
@example(b"[1]", 3)
@example(b'{"a":1,"b":2,}', 3)
@example(b'{"a":[1,]}', 3)
@example(b'{"a":[],"b":{},"c":[[],{}]}', 3)
@example(b'{"a" 1}', 3)
@example(b'{"a":1 "b":2}', 3)
@example(b'{"a":1]', 3)
@example(b'{"a":1}}', 3)
@example(b'{"a":1}\x00', 3)
@example(b'\n{ "a"\t:\r1 } ', 3)
@example(b'{"a":{"b":1,"b":[2]},"b":3}', 3)
@example(b'{"a":1,"\\u0061":2}', 3)
@example(b'{"a":"\x1f"}', 3)
@example(b'{"a":"\x7f"}', 3)
@example('{"é":"\U0001f600"}'.encode(), 3)
@example(b'{"a":"\xc3"}', 3)
@example(b'{"a":"\xed\xa0\x80"}', 3)
@example(b'{"a":"\\ud800"}', 3)
@example(b'{"a":"\\q"}', 3)
@example(b'{"\\"":1,"\\\\":2,"\\n":3,"a\\"b":4,"":5}', 3)
@example('{"é":1,"éé":2}'.encode(), 3)
@example(b"\xef\xbb\xbf{}", 3)
def test_json_objects_are_read_alike(body: bytes, max_depth: int) -> None:
    assert spelled(kernel.json_object(body, max_depth)) == spelled(pure.json_object(body, max_depth))


WORDS = st.sampled_from(
    ["0", "-0", "00", "01", "-1", "1.5", "1.", ".5", "1e5", "1e400", "-1E-7", "+1", "--1", "1a", "true", "True", "nul",
     "null", "falsey", "NaN", "Infinity", "", " ", "é", "\x00", "9" * 18, "9" * 19, "18446744073709551616", "1" * 400]
)  # fmt: skip


@compiled
@given(WORDS | st.from_regex(r"[0-9eE+.-]{0,24}", fullmatch=True), st.sampled_from(["", " ", "\n"]))
def test_numbers_and_words_are_read_alike(word: str, space: str) -> None:
    for body in (f'{{"a":{word}{space}}}', f'{{"a":[{space}{word},1]}}', f'{{"a":{word}'):
        found = kernel.json_object(body.encode(), 3)
        assert spelled(found) == spelled(pure.json_object(body.encode(), 3))


@compiled
@pytest.mark.parametrize("depth", [1, 2, 64, 127, 128, 129, 1000])
@pytest.mark.parametrize("most", [-1, 0, 1, 64, 128, 129, 1000])
def test_nesting_is_limited_alike(depth: int, most: int) -> None:
    body = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + (b"1" if depth == 1 else b"") + b"}"
    found = kernel.json_object(body, most)
    assert spelled(found) == spelled(pure.json_object(body, most))
    assert (found is not None) == (depth <= min(most, 128))


def spelled(document: dict[str, Any] | None) -> str:
    """The document with the types of its values and the order of its keys."""
    return repr(document)


@pytest.mark.parametrize("build", BUILDS)
@given(body=JSON_TEXTS)
def test_a_json_object_is_read_as_a_parser_reads_it(build: ModuleType, body: bytes) -> None:
    assert build.json_object(body, 64) == json.loads(body)


@pytest.mark.parametrize("build", BUILDS)
def test_a_key_that_is_there_twice_and_deeper_nesting_are_not_read(build: ModuleType) -> None:
    body = b'{"a":1,"\\u0062":{"a":2,"a":3}, "c" : [[]]}'
    assert build.json_object(body, 3) == {"a": 1, "b": {"a": 3}, "c": [[]]}
    assert build.json_object(body, 2) is None
    assert build.json_object(b'{"a":1,"\\u0061":2}', 3) is None


NAMES = st.sampled_from(
    [b"Host", b"host", b"Content-Length", b"Connection", b"Expect", b"Upgrade", b"Transfer-Encoding", b"X-Request-Id",
     b"Accept", b"a_b", b"Proxy-Connection", b"", b"x" * 64, b"x" * 65]
)  # fmt: skip
FIELD_VALUES = st.sampled_from(
    [b"x", b"5", b"0", b"05", b"+5", b"5 ", b"keep-alive", b"Keep-Alive", b"close", b"", b" x", b"a b", b"a\tb",
     b"\xe9", b"a\x00", b"99999999999", b"chunked"]
)  # fmt: skip
FIELDS = st.lists(st.tuples(NAMES, st.sampled_from([b": ", b":", b":  ", b" : ", b"\t:"]), FIELD_VALUES), max_size=6)
LINES = st.sampled_from(
    [b"POST /v1/completions HTTP/1.1", b"GET /livez HTTP/1.1", b"GET /a?b=c HTTP/1.1", b"PUT / HTTP/1.1",
     b"POST / HTTP/1.0", b"GET  / HTTP/1.1", b"GET x HTTP/1.1", b"GET /a#b HTTP/1.1", b"GET /\xe9 HTTP/1.1",
     b"GET /" + b"x" * 511 + b" HTTP/1.1", b"GET /" + b"x" * 512 + b" HTTP/1.1", b"POST / HTTP/1.1 "]
)  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    ends = draw(st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"]))
    fields = [b"%b%b%b" % field for field in draw(FIELDS)]
    if draw(st.booleans()):
        fields.insert(0, b"host: x")
    body = draw(st.sampled_from([b"", b"hello", b"hello\r\n\r\n"]))
    if draw(st.booleans()):
        fields.append(b"content-length: %d" % (len(body) + draw(st.sampled_from([0, 0, 0, 1, -1]))))
    data = b"\r\n".join([draw(LINES), *fields[:-1]]) + (ends + fields[-1] if fields else b"") + b"\r\n\r\n" + body
    if draw(st.booleans()):
        data = bytearray(data)
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data)


PLAIN = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
LONG = b"POST /score HTTP/1.1\r\nHost: x\r\n%b\r\n" % b"".join(b"a: %b\r\n" % (b"b" * 500) for _ in range(9))


@compiled
@given(requests() | st.binary(max_size=64))
@example(PLAIN)
@example(LONG)
@example(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 31 + b"\r\n")
@example(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 32 + b"\r\n")
@example(b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * (4096 - 33) + b"\r\n\r\n")
@example(b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * (4096 - 32) + b"\r\n\r\n")
def test_whole_requests_are_read_alike(data: bytes) -> None:
    for end in (len(data), len(data) // 2):
        part = memoryview(data)[:end]
        assert kernel.whole_request(part, KNOWN_HEADERS) == pure.whole_request(part, KNOWN_HEADERS)


class Parsed:
    """What the HTTP parser makes of a request."""

    def __init__(self, data: bytes) -> None:
        self.target = self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = 0
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete += 1
        assert self.parser.should_keep_alive()
        assert not self.parser.should_upgrade()


@pytest.mark.parametrize("build", BUILDS)
@given(data=requests())
@example(data=PLAIN)
def test_a_request_that_is_read_as_a_whole_is_what_the_parser_reads(build: ModuleType, data: bytes) -> None:
    whole = build.whole_request(memoryview(data), KNOWN_HEADERS)
    if whole is None:
        return
    parsed, incoming = Parsed(data), HttpRequest()
    version = parsed.parser.get_http_version()
    incoming.take_head(parsed.parser.get_method(), parsed.target, version, parsed.headers, KNOWN_HEADERS)
    assert parsed.complete == 1
    assert whole == (incoming.method, incoming.path, incoming.headers, parsed.body)


@pytest.mark.parametrize("build", BUILDS)
def test_usual_requests_are_read_as_a_whole_and_others_are_not(build: ModuleType) -> None:
    headers = {b"host": b"x", b"content-length": b"5"}
    assert build.whole_request(PLAIN, KNOWN_HEADERS) == (b"POST", b"/score", headers, b"hello")
    assert build.whole_request(LONG, KNOWN_HEADERS) is None
    for cut in range(len(PLAIN)):
        assert build.whole_request(PLAIN[:cut], KNOWN_HEADERS) is None
    assert build.whole_request(PLAIN + PLAIN, KNOWN_HEADERS) is None


EVENT_PIECES = st.lists(
    st.sampled_from(
        [b"data: x\n\n", b"data: x\r\n\r\n", b"\n\n", b"\n", b'"usage"', b'data: {"error"', b'{"error"',
         b'"finish_reason":"abort"', b'"abort"', b'"',
         b'""', b"data: [DONE]\n\n", b"x" * 300]
    ),
    max_size=4,
).map(b"".join)  # fmt: skip
SIZES = st.sampled_from(
    [b"%x\r\n", b"%X\r\n", b"%x\r\n", b"0%x\r\n", b"%x;a\r\n", b"0x%x\r\n", b"%x \r\n", b"%x\n", b"%07x\r\n"]
)


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    sent = b""
    for data in draw(st.lists(EVENT_PIECES.map(lambda data: data + b"\n\n") | EVENT_PIECES, max_size=3)):
        sent += draw(SIZES) % abs(len(data) + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))) + data
        sent += draw(st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b""]))
    return sent[: draw(st.just(len(sent)) | st.integers(0, len(sent)))]


class ParsedChunks:
    """What the HTTP parser makes of chunks, whose ends it counts."""

    def __init__(self, data: bytes) -> None:
        self.body = b""
        self.ends = 0
        self.is_complete = False
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_chunk_complete(self) -> None:
        self.ends += 1

    def on_message_complete(self) -> None:
        self.is_complete = True


@compiled
@given(chunks() | st.binary(max_size=64))
@example(b"6\r\nabcd\n\n\r\n")
@example(b"1\r\n\n\n\r\n")
@example(b"fffff\r\n" + b"\n" * 0xFFFFF + b"\r\n")
def test_chunks_of_events_are_counted_alike(data: bytes) -> None:
    assert kernel.event_chunks(data) == pure.event_chunks(data)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("word", "count"),
    [(b'"usage"', 0), (b'"finish_reason":"abort"', 0), (b"[DONE]", 0), (b'data: {"error"', 0),
     (b'"u"', 1), (b'"a', 1), (b"[D", 1), (b'{"error"', 1), (b'"error":"abort"', 1)],
)  # fmt: skip
def test_what_is_special_is_found_at_every_place(build: ModuleType, word: bytes, count: int) -> None:
    for before in range(40):
        for after in (0, 1, 15, 16, 17, 40):
            event = b"x" * before + word + b"x" * after + b"\n\n"
            assert build.event_chunks(b"%x\r\n%b\r\n" % (len(event), event)) == count


@pytest.mark.parametrize("build", BUILDS)
@given(data=chunks())
def test_chunks_that_may_be_passed_on_are_what_the_parser_reads(build: ModuleType, data: bytes) -> None:
    count = build.event_chunks(data)
    if not count:
        return
    parsed = ParsedChunks(data)
    assert (parsed.ends, parsed.is_complete) == (count, False)
    assert parsed.body.endswith(b"\n\n")
    assert not any(
        word in parsed.body for word in (b'"usage"', b'data: {"error"', b'"finish_reason":"abort"', b"[DONE]")
    )
    parsed.parser.feed_data(b"0\r\n\r\n")  # it was at the end of a chunk
    assert parsed.is_complete


@pytest.mark.parametrize("build", BUILDS)
def test_usual_chunks_of_events_may_be_passed_on_and_others_not(build: ModuleType) -> None:
    chunk = b'd\r\ndata: "usag\n\n\r\n'
    assert build.event_chunks(chunk) == 1
    assert build.event_chunks(chunk * 3) == 3
    for cut in range(1, len(chunk)):
        assert build.event_chunks(chunk[:cut]) == 0
        assert build.event_chunks(chunk + chunk[:cut]) == 0
    assert build.event_chunks(b"e\r\ndata: [DONE]\n\n\r\n") == 0
    assert build.event_chunks(b"d\r\ndata:[DONE]\n\n\r\n" + chunk) == 0
    assert build.event_chunks(chunk + b"0\r\n\r\n") == 0


TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "é"]) | TEXT, "content": TEXT | VALUES})
    | st.dictionaries(st.sampled_from(["role", "content", "name"]), TEXT, max_size=3)
    | VALUES,
    max_size=5,
)
PLAIN_TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=700)}),
    max_size=5,
)


@compiled
@given(TURNS | PLAIN_TURNS, st.sampled_from([-1, 0, 1, 512, 513, 1400, 2097152]))
def test_turns_are_spelled_alike(turns: list[Any], room: int) -> None:
    assert outcome(kernel.text_turns, turns, room) == outcome(pure.text_turns, turns, room)


@compiled
@given(st.lists(st.binary(max_size=9000), max_size=6), st.integers(0, 2**64 - 1))
@example([b"", b"x" * 4096, b"y", b"", b"z" * 2097152, b"more"], 7)
@example([b"x" * 2097152, b""], 7)
def test_keys_of_prefix_blocks_are_equal(pieces: list[bytes], chain: int) -> None:
    assert kernel.prefix_keys(pieces, chain) == pure.prefix_keys(pieces, chain)


PLAIN_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(0, 10**12 - 1)
    | st.integers(0, 10**15 - 1).map(lambda thousandths: thousandths / 1e3)
    | st.text(st.characters(min_codepoint=32, max_codepoint=127, exclude_characters='"\\'), max_size=40)
)
LINE_VALUES = PLAIN_VALUES | VALUES | st.floats() | st.floats(0, 1e16).map(lambda value: value // 1 / 1e3)


@compiled
@given(
    st.lists(
        st.sampled_from([b"%b", b"%b", b"%b", b"%", b"%%", b"%d", b'"a":', b",", b"\x00", b"x" * 1400]), max_size=9
    ),
    st.lists(LINE_VALUES, max_size=6),
)
@example([b"%b"] * 3, ["x" * 4072, "x", 1.5])
@example([b"%b"], ["x" * 4073])
@example([b"%b" * 12], [-0.0, 0.0, 0.001, 1e12, 999999999999.999, 1e-4, 2**63, 2**64, -1, True, "\x1f", "\x7f"])
def test_lines_are_written_alike(pieces: list[bytes], values: list[Any]) -> None:
    template = b"".join(pieces)
    line = kernel.json_line(template, values)
    assert line is None or line == pure.json_line(template, values)


@compiled
@given(st.lists(PLAIN_VALUES, max_size=20))
def test_lines_of_plain_values_are_written_by_the_extension(values: list[Any]) -> None:
    template = b"[" + b",".join([b"%b"] * len(values)) + b"]\n"
    assert kernel.json_line(template, values) == pure.json_line(template, values)
    assert json.loads(pure.json_line(template, values)) == values


@compiled
@pytest.mark.parametrize("args", [(), (b"",), (b"", b"", b""), ("text", "text"), (1, 1), ([1], "x"), (None, None)])
@pytest.mark.parametrize(
    ("name", "nothing"),
    [("json_object", None), ("whole_request", None), ("event_chunks", 0), ("text_turns", None), ("prefix_keys", None),
     ("json_line", None)],
)  # fmt: skip
def test_other_arguments_are_an_error_or_nothing(name: str, nothing: Any, args: tuple[Any, ...]) -> None:
    assert outcome(getattr(kernel, name), *args) in (nothing, TypeError)
