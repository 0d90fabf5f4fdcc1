import pytest

from gateway.core.errors import InvalidRequest, MethodNotAllowed, RouteNotFound
from gateway.core.request import Kind
from tests.routes import ROUTES, find_route

POSTS = {
    "/v1/chat/completions": Kind.GENERATE,
    "/v1/chat/completions/batch": Kind.GENERATE,
    "/v1/completions": Kind.GENERATE,
    "/v1/responses": Kind.GENERATE,
    "/v1/messages": Kind.GENERATE,
    "/v1/embeddings": Kind.POOL,
    "/v1/score": Kind.POOL,
    "/score": Kind.POOL,
    "/v1/rerank": Kind.POOL,
    "/rerank": Kind.POOL,
    "/v2/rerank": Kind.POOL,
    "/pooling": Kind.POOL,
    "/classify": Kind.POOL,
    "/v2/embed": Kind.POOL,
    "/generative_scoring": Kind.POOL,
    "/invocations": Kind.LIGHT,
    "/v1/messages/count_tokens": Kind.LIGHT,
    "/tokenize": Kind.LIGHT,
    "/detokenize": Kind.LIGHT,
    "/v1/audio/transcriptions": Kind.UPLOAD,
    "/v1/audio/translations": Kind.UPLOAD,
}
GETS = {
    "/v1/models": "models",
    "/version": "version",
    "/load": "load",
    "/livez": "livez",
    "/readyz": "readyz",
    "/health": "readyz",
    "/ping": "readyz",
}
KEPT = {
    (b"POST", b"/v1/files"): "files",
    (b"GET", b"/v1/files"): "files",
    (b"GET", b"/v1/files/{id}"): "files",
    (b"DELETE", b"/v1/files/{id}"): "files",
    (b"GET", b"/v1/files/{id}/content"): "files",
    (b"POST", b"/v1/batches"): "batches",
    (b"GET", b"/v1/batches"): "batches",
    (b"GET", b"/v1/batches/{id}"): "batches",
    (b"POST", b"/v1/batches/{id}/cancel"): "batches",
}


def test_the_table_is_exactly_this() -> None:
    expected = {(b"POST", path.encode()) for path in POSTS} | {(b"GET", path.encode()) for path in GETS}
    expected |= {(b"POST", b"/ping"), (b"GET", b"/tokenizer_info"), (b"GET", b"/v1/realtime")}
    expected |= {(b"HEAD", path.encode()) for path in GETS}
    expected |= {(b"OPTIONS", path.encode()) for path, endpoint in GETS.items() if endpoint in ("livez", "readyz")}
    assert set(ROUTES) == expected | KEPT.keys()


@pytest.mark.parametrize(("path", "kind"), POSTS.items())
def test_what_is_forwarded_goes_to_the_same_path(path: str, kind: Kind) -> None:
    route = find_route(b"POST", path.encode())
    assert (route.kind, route.target, route.local, route.public) == (kind, path.encode(), False, False)


@pytest.mark.parametrize(("path", "endpoint"), GETS.items())
def test_what_we_answer_ourselves(path: str, endpoint: str) -> None:
    route = find_route(b"GET", path.encode())
    assert (route.local, route.endpoint) == (True, endpoint)
    assert route.public == (path not in ("/v1/models", "/version", "/load"))


@pytest.mark.parametrize(("method", "path"), KEPT)
def test_files_and_batches_are_ours_and_need_a_key(method: bytes, path: bytes) -> None:
    route = find_route(method, path.replace(b"{id}", b"file-0a_b") + b"?limit=2&after=file-1")
    assert (route.local, route.answered_by, route.public) == (True, "batches", False)
    assert route.endpoint == KEPT[method, path]


@pytest.mark.parametrize(
    "path", ["/v1/files/a.b", "/v1/files/", "/v1/files/a/b", "/v1/files//content", "/v1/batches/a/"]
)
def test_a_path_that_is_not_quite_one_of_files_and_batches(path: str) -> None:
    with pytest.raises(RouteNotFound):
        find_route(b"GET", path.encode())


def test_a_batch_cannot_be_deleted() -> None:
    with pytest.raises(MethodNotAllowed):
        find_route(b"DELETE", b"/v1/batches/batch_1")


def test_a_query_string_is_dropped() -> None:
    assert find_route(b"POST", b"/v1/completions?a=/livez").target == b"/v1/completions"
    assert find_route(b"GET", b"/v1/responses/resp_1?fields=x&y").target == b"/v1/responses/resp_1"
    assert find_route(b"POST", b"/v1/responses/resp_1/cancel?stream=true").target == b"/v1/responses/resp_1/cancel"


@pytest.mark.parametrize(
    ("query", "passed", "streams"),
    [
        (b"stream=true", b"?stream=true", True),
        (b"stream=false", b"?stream=false", False),
        (b"starting_after=42&stream=true", b"?starting_after=42&stream=true", True),
        (b"a=b&stream=true&starting_after=0&api_key=x", b"?stream=true&starting_after=0", True),
        (b"stream=true&stream=false", b"?stream=false", False),
        (b"include[]=a.b&stream=true&include%5B%5D=c", b"?include[]=a.b&stream=true&include%5B%5D=c", True),
        (b"include=a&include_obfuscation=false", b"?include=a&include_obfuscation=false", False),
    ],
)
def test_a_stored_response_is_read_as_a_stream_from_where_the_client_says(
    query: bytes, passed: bytes, streams: bool
) -> None:
    route = find_route(b"GET", b"/v1/responses/resp_1?" + query)
    assert (route.target, route.streams) == (b"/v1/responses/resp_1" + passed, streams)


@pytest.mark.parametrize(
    "query",
    [
        b"stream=yes",
        b"stream",
        b"stream=true%0d%0aa:b",
        b"starting_after=-1",
        b"starting_after=1 HTTP/1.1",
        b"include=a%20b",
        b"&".join(b"include=a_%b" % (b"a" * n) for n in range(17)),
    ],
)
def test_what_such_a_query_may_not_say_is_refused(query: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"parameter {query.partition(b'=')[0].decode()}|16 parameters"):
        find_route(b"GET", b"/v1/responses/resp_1?" + query)


def test_an_error_about_a_url_shows_no_query_and_no_password() -> None:
    for path in (b"/nowhere?api_key=sk-1", b"http://me:sk-1@a/v1/models", b"sk-1"):
        with pytest.raises(RouteNotFound) as error:
            find_route(b"GET", path)
        assert "sk-1" not in error.value.message


@pytest.mark.parametrize(
    "path",
    [b"/", b"", b"//v1/completions", b"/v1/completions/", b"/V1/completions", b"/v1/./completions",
     b"/v1%2fcompletions",
     b"/v1/completions/..",
     b"http://h/v1/completions", b"/metrics", b"/sleep", b"/reset_prefix_cache",
     b"/v1/load_lora_adapter", b"/collective_rpc", b"/server_info", b"/docs", b"/v1/models/", b"/v1/responses/",
     b"/v1/responses/a/b", b"/v1/responses/../sleep", b"/v1/responses/a%2f..", b"\xff\xfe", b"*"],
)  # fmt: skip
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_everything_else_of_a_backend_is_out_of_reach(method: bytes, path: bytes) -> None:
    with pytest.raises(RouteNotFound):
        find_route(method, path)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [(b"GET", b"/v1/completions", "POST"), (b"POST", b"/livez", "GET, HEAD, OPTIONS"),
     (b"DELETE", b"/v1/models", "GET, HEAD"), (b"HEAD", b"/tokenizer_info", "GET"),
     (b"OPTIONS", b"/tokenize", "POST"), (b"PUT", b"/score?x", "POST")],
)  # fmt: skip
def test_a_known_path_with_another_method_says_which_one_is_right(method: bytes, path: bytes, allowed: str) -> None:
    with pytest.raises(MethodNotAllowed, match=f"is not allowed for .*; use {allowed}") as error:
        find_route(method, path)
    assert error.value.allow == allowed


def test_a_model_is_found_by_its_path() -> None:
    route = find_route(b"GET", b"/v1/models/org/name-1.5:tag%20x")
    assert (route.local, route.endpoint, route.target) == (True, "model", b"/v1/models/org/name-1.5:tag%20x")
    with pytest.raises(RouteNotFound):
        find_route(b"POST", b"/v1/models/m")


def test_a_stored_response_can_be_read_and_cancelled() -> None:
    read, cancelled = find_route(b"GET", b"/v1/responses/resp_1"), find_route(b"POST", b"/v1/responses/resp_1/cancel")
    assert read.stored
    assert cancelled.stored
    assert cancelled.target == b"/v1/responses/resp_1/cancel"
    for method, path in ((b"POST", b"/v1/responses/resp_1"), (b"GET", b"/v1/responses/resp_1/cancel")):
        with pytest.raises(RouteNotFound):
            find_route(method, path)


def test_streams_that_have_an_end_marker_know_it() -> None:
    markers = {route.endpoint: route.done_marker for route in ROUTES.values() if route.done_marker}
    assert set(markers) == {"chat", "completions", "messages", "transcriptions", "translations"}
    assert markers["messages"] == b"event: message_stop"


def test_usage_is_injected_only_where_the_option_exists() -> None:
    assert {route.endpoint for route in ROUTES.values() if route.injects_usage} == {"chat", "completions"}


def test_an_error_shows_at_most_200_bytes_of_the_path() -> None:
    with pytest.raises(RouteNotFound) as error:
        find_route(b"GET", b"/" + b"x" * 5000)
    assert len(error.value.message) < 250
