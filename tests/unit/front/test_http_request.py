import pytest

from gateway.core.errors import HeadersTooLarge, InvalidRequest
from gateway.core.front.http_request import KNOWN_HEADERS, HttpRequest

HOST = (b"Host", b"x")


def take(*headers: tuple[bytes, bytes], version: str = "1.1", host: bool = True) -> HttpRequest:
    incoming = HttpRequest()
    incoming.take_head(b"POST", b"/v1/models", version, [*([HOST] if host else []), *headers], KNOWN_HEADERS)
    return incoming


def test_headers_that_matter_are_kept_in_lower_case_and_all_others_are_dropped() -> None:
    incoming = take((b"Content-Type", b"application/json"), (b"X-Forwarded-For", b"1.2.3.4"), (b"Cookie", b"a=b"))
    assert incoming.headers == {b"host": b"x", b"content-type": b"application/json"}


@pytest.mark.parametrize("name", sorted(KNOWN_HEADERS - {b"traceparent", b"tracestate", b"expect"}))
def test_a_header_that_decides_something_must_not_be_there_twice(name: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Duplicate header"):
        take((name, b"chunked"), (name.title(), b"chunked"))


def test_of_trace_headers_the_last_one_counts() -> None:
    assert take((b"tracestate", b"a"), (b"tracestate", b"b")).headers[b"tracestate"] == b"b"


def test_unknown_headers_may_repeat() -> None:
    take((b"x-a", b"1"), (b"x-a", b"2"))


@pytest.mark.parametrize("version", ["0.9", "2.0", "1.2"])
def test_only_http_1_is_spoken(version: str) -> None:
    with pytest.raises(InvalidRequest, match="Unsupported HTTP version"):
        take(version=version)


def test_http_1_1_needs_a_host_and_1_0_does_not() -> None:
    with pytest.raises(InvalidRequest, match="Host"):
        take(host=False)
    assert take(version="1.0", host=False).http10


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"identity", b"chunked, chunked", b""])
def test_the_only_transfer_coding_is_chunked(coding: bytes) -> None:
    with pytest.raises(InvalidRequest, match="chunked"):
        take((b"transfer-encoding", coding))


def test_chunked_is_for_http_1_1_alone() -> None:
    take((b"transfer-encoding", b"Chunked"))
    with pytest.raises(InvalidRequest, match="chunked"):
        take((b"transfer-encoding", b"chunked"), version="1.0")


def test_the_only_expectation_is_100_continue() -> None:
    take((b"expect", b"100-Continue"))
    with pytest.raises(InvalidRequest, match="100-continue"):
        take((b"expect", b"x"))


def test_a_header_of_8190_bytes_is_accepted_and_a_longer_one_is_not() -> None:
    take((b"x-a", b"x" * 8190))
    with pytest.raises(HeadersTooLarge, match="limit of 8190 bytes"):
        take((b"x-a", b"x" * 8191))
    with pytest.raises(HeadersTooLarge, match="limit of 8190 bytes"):
        take((b"x" * 8191, b""))


def test_two_requests_share_nothing() -> None:
    first, second = take((b"x-request-id", b"1")), HttpRequest()
    first.body = b"x"
    assert second.headers == {}
    assert second.body == b""


@pytest.mark.parametrize("name", [b"content_length", b"Transfer_Encoding", b"x_api_key"])
def test_a_header_that_others_may_take_for_one_that_decides_is_refused(name: bytes) -> None:
    with pytest.raises(InvalidRequest, match="underscores"):
        take((name, b"1"))
    take((b"x_other", b"1"))


def test_a_configured_header_is_kept_as_the_known_ones_are() -> None:
    known = KNOWN_HEADERS | {b"x-user"}
    incoming = HttpRequest()
    incoming.take_head(b"POST", b"/v1/models", "1.1", [HOST, (b"X-User", b"ann")], known)
    assert incoming.headers[b"x-user"] == b"ann"
    for other in (b"X-User", b"x_user"):
        with pytest.raises(InvalidRequest):
            HttpRequest().take_head(b"POST", b"/v1/models", "1.1", [HOST, (b"x-user", b"ann"), (other, b"bob")], known)
