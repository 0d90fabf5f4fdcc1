from typing import Any

import orjson
import pytest

from gateway.config import Config, EmbeddingsConfig, ServerConfig
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import InvalidRequest, PreviousResponseNotFound
from gateway.core.front.read import MEDIA_TOKENS, RequestReader, upstream_headers
from gateway.core.request import InferenceRequest, Kind
from gateway.features.embeddings.inputs import Pairs
from gateway.features.keys.settings import KeyConfig
from gateway.features.models.settings import ModelsConfig
from gateway.features.responses.stored import Place, StoredResponses
from tests.unit.front.readers import request_reader
from tests.unit.front.wires import Sent

ISOLATED, OTHER = (KeyConfig(name=name, key=name, isolate_cache=True) for name in ("ann", "bob"))
SHARED = KeyConfig(name="cat", key="cat")
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x" * 3000}]}


def reader(stored: StoredResponses | None = None, **server: int) -> RequestReader:
    return reader_of(ModelsConfig(aliases={"gpt": "org/m"}), stored, **server)


def reader_of(models: ModelsConfig, stored: StoredResponses | None = None, **server: int) -> RequestReader:
    config = Config(
        backends=(BackendConfig(url="http://10.0.0.1:8000"),),
        models=models,
        server=ServerConfig.model_validate(server),
    )
    return request_reader(config, stored=stored)


def read(
    document: dict[str, Any] | bytes,
    path: bytes = b"/v1/chat/completions",
    *,
    key: KeyConfig | None = None,
    only_model: str | None = None,
    through: RequestReader | None = None,
    headers: dict[bytes, bytes] | None = None,
) -> InferenceRequest:
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    incoming = Sent(path, body, headers=headers or {}).incoming()
    incoming.key = key
    assert incoming.route is not None
    return (through or reader()).read(incoming, incoming.route, "id-1", lambda: only_model)


def test_a_body_that_need_not_change_is_passed_on_byte_for_byte() -> None:
    body = b' { "model" : "m", "seed": 123456789012345678901234567890, "messages":[ ] } '
    request = read(body)
    assert request.body is body or request.body == body
    assert (request.method, request.target, request.content_type) == (
        b"POST",
        b"/v1/chat/completions",
        b"application/json",
    )


def test_what_placement_needs_is_read() -> None:
    ask = read(CHAT | {"n": 2, "max_tokens": 7, "stream": True}).demand
    assert (ask.model, ask.sequences, ask.output_tokens, ask.streams) == ("m", 2, 7, True)
    assert ask.prompt_size == ask.edges[-1] == ask.learnable_bytes > 3000
    assert ask.prompt_tokens == ask.prompt_size // 4
    assert len(ask.keys) == len(ask.edges) == 12
    assert not ask.divisible


def test_an_alias_becomes_the_models_name_in_the_body_too() -> None:
    request = read(CHAT | {"model": "gpt"})
    assert request.demand.model == "org/m"
    assert orjson.loads(request.body) == CHAT | {"model": "org/m"}


def test_without_a_model_the_only_one_is_meant_and_the_body_stays() -> None:
    body = b'{"messages":[]}'
    request = read(body, only_model="m")
    assert (request.demand.model, request.body) == ("m", body)
    with pytest.raises(InvalidRequest, match="must provide a model") as error:
        read(body)
    assert error.value.param == "model"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions"])
@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": None}, {"include_usage": False}, {"include_usage": False, "include_obfuscation": True},
     {"continuous_usage_stats": True}],
)  # fmt: skip
def test_usage_is_asked_for_on_streams_and_hidden_if_the_client_did_not(
    options: dict[str, bool] | None, path: bytes
) -> None:
    request = read(CHAT | {"stream": True} | ({} if options is None else {"stream_options": options}), path)
    assert request.hides_usage
    others = {name: value for name, value in (options or {}).items() if name == "include_obfuscation"}
    assert orjson.loads(request.body)["stream_options"] == {"include_usage": True, **others}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({}, b"/v1/chat/completions"),
        ({"stream": False}, b"/v1/chat/completions"),
        ({"stream": True, "stream_options": {"include_usage": True}}, b"/v1/chat/completions"),
        ({"stream": True, "stream_options": {"include_usage": True, "more": 1}}, b"/v1/completions"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, b"/v1/completions"),
        ({"stream": True, "stream_options": [1]}, b"/v1/completions"),
        ({"stream": True}, b"/v1/responses"),
        ({"stream": True}, b"/v1/messages"),
    ],
)
def test_otherwise_usage_is_left_as_the_client_wants_it(fields: dict[str, Any], path: bytes) -> None:
    request = read(CHAT | fields, path)
    assert not request.hides_usage
    assert orjson.loads(request.body) == CHAT | fields


def test_an_isolated_key_gets_a_salt_that_no_other_key_can_have() -> None:
    bodies = [orjson.loads(read(CHAT, key=key).body) for key in (ISOLATED, OTHER, SHARED)]
    salts = [body.get("cache_salt") for body in bodies]
    assert salts[2] is None
    assert len({*salts}) == 3
    assert orjson.loads(read(CHAT, key=ISOLATED).body)["cache_salt"] == salts[0]
    assert len(salts[0]) == 64


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[],"cache_salt":"mine"}',
        b'{"model":"m","messages":[],"cache\\u005fsalt":"mine"}',
        b'{"model":"m","messages":[],"cache\\u005fsalt":"mine","metadata":{"cache_salt":"x"}}',
    ],
)
def test_the_salt_that_an_isolated_client_chose_is_kept_within_its_own(body: bytes) -> None:
    salt = orjson.loads(read(body, key=ISOLATED).body)["cache_salt"]
    assert salt not in ("mine", orjson.loads(read(CHAT, key=ISOLATED).body)["cache_salt"])
    assert salt == orjson.loads(read(CHAT | {"cache_salt": "mine"}, key=ISOLATED).body)["cache_salt"]


def test_prompts_under_another_model_or_salt_have_other_blocks() -> None:
    through = reader()
    same = read(CHAT, through=through).demand.keys
    assert read(CHAT, through=through).demand.keys == same
    others = [
        read(CHAT | {"model": "other"}, through=through),
        read(CHAT | {"cache_salt": "x"}, through=through),
        read(CHAT, through=through, key=ISOLATED),
        read(CHAT, through=through, key=OTHER),
    ]
    keys = [same, *(request.demand.keys for request in others)]
    assert len({each[0] for each in keys}) == 5


def test_pooling_requests_count_their_inputs_and_have_no_blocks() -> None:
    request = read({"model": "m", "input": ["a", "b", "c"]}, b"/v1/embeddings")
    assert (request.kind, request.demand.sequences, request.demand.divisible) == (Kind.POOL, 3, True)
    assert (request.demand.keys, request.demand.output_tokens) == ((), 0)


@pytest.mark.parametrize(
    ("path", "fields", "size_bytes"),
    [
        (b"/v1/embeddings", {"input": "x" * 40_000}, 40_000),
        (b"/v1/embeddings", {"input": ["x" * 400] * 64}, 64 * 400),
        (b"/v1/embeddings", {"input": ["x" * 400], "some_field": 1}, 400),
        (b"/classify", {"input": ["x" * 4000] * 3}, 3 * 4000),
        (b"/pooling", {"messages": [{"role": "user", "content": "x" * 4000}]}, 4000),
        (b"/score", {"text_1": "q" * 1000, "text_2": ["x" * 1000] * 9}, 9 * 2000),
        (b"/rerank", {"query": "q" * 1000, "documents": ["x" * 1000] * 9}, 9 * 2000),
    ],
)
def test_what_is_embedded_or_scored_counts_with_its_tokens(
    path: bytes, fields: dict[str, Any], size_bytes: int
) -> None:
    through = reader()
    request = read({"model": "m"} | fields, path, through=through)
    assert size_bytes // 4 <= request.demand.prompt_tokens <= size_bytes // 4 + 100
    assert request.demand.output_tokens == 0


@pytest.mark.parametrize("images", [1, 3])
def test_an_image_that_is_embedded_counts_as_media(images: int) -> None:
    url = "data:image/png;base64," + "A" * 100_000
    content = [{"type": "text", "text": "x" * 4000}, *[{"type": "image_url", "image_url": {"url": url}}] * images]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    tokens = read(body, b"/v1/embeddings").demand.prompt_tokens
    assert 1000 + images * MEDIA_TOKENS <= tokens <= 1100 + images * (MEDIA_TOKENS + 30)


def test_only_so_many_media_are_looked_for() -> None:
    body = {"model": "m", "input": [";base64,"] * 20_000}
    assert read(body, b"/v1/embeddings").demand.prompt_tokens < 1024 * MEDIA_TOKENS + 80_000


def test_look_ups_take_no_sequence() -> None:
    assert read({"model": "m", "prompt": ["a", "b"]}, b"/tokenize").demand.sequences == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": "x" * 1025}, "model"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": "x"}, "max_completion_tokens"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"n": 1025}, "n"),
        ({"prompt": ["a"] * 600, "n": 2, "messages": None}, "n"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(CHAT | fields)
    assert error.value.param == param


def test_exactly_the_allowed_sequences_are_accepted() -> None:
    assert read(CHAT | {"n": 1024}).demand.sequences == 1024
    with pytest.raises(InvalidRequest, match="limit of 4 per request"):
        read(CHAT | {"n": 5}, through=reader(max_sequences=4))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_each_name_for_the_length_of_the_answer_is_understood(name: str) -> None:
    assert read(CHAT | {name: 9}).demand.output_tokens == 9


@pytest.mark.parametrize(
    ("path", "fields", "repeatable"),
    [
        (b"/v1/chat/completions", {"store": True}, True),
        (b"/v1/responses", {}, True),
        (b"/v1/responses", {"store": True}, True),
        (b"/v1/responses", {"store": False, "background": True}, False),
        (b"/v1/responses", {"background": True}, False),
        (b"/v1/responses", {"store": False}, True),
    ],
)
def test_a_request_that_its_engine_goes_on_with_is_not_sent_twice(
    path: bytes, fields: dict[str, Any], repeatable: bool
) -> None:
    assert read({"model": "m", "input": "x"} | fields, path).repeatable == repeatable


def test_only_harmless_headers_travel_on() -> None:
    headers = {
        b"traceparent": b"00-1-2-03",
        b"tracestate": b"a=b",
        b"x-session-id": b"s 1",
        b"authorization": b"Bearer secret",
        b"x-request-id": b"client's",
    }
    assert read(CHAT, headers=headers).headers == (
        b"x-request-id: id-1\r\ntraceparent: 00-1-2-03\r\ntracestate: a=b\r\nx-session-id: s 1\r\n"
    )


@pytest.mark.parametrize("value", [b"", b" x", b"a\rb", b"a\nb", b"a\x00", b"\xff", b"x" * 1025])
def test_a_value_that_could_break_a_header_is_dropped(value: bytes) -> None:
    incoming = Sent(headers={b"tracestate": value}).incoming()
    assert upstream_headers(incoming, "id-1") == b"x-request-id: id-1\r\n"


def test_a_response_is_continued_where_the_one_before_is_stored_and_by_its_client_alone() -> None:
    stored = StoredResponses()
    stored.remember(b'{"id":"resp_1"}', Place("b", "m", ("cat", "cat")))
    through, body = reader(stored), {"model": "m", "input": "x", "previous_response_id": "resp_1"}
    assert read(body, b"/v1/responses", key=SHARED, through=through).demand.pinned == "b"
    assert read(body, through=through).demand.pinned is None
    with pytest.raises(PreviousResponseNotFound, match="Previous response with id 'resp_1' not found") as error:
        read(body, b"/v1/responses", through=through)
    assert error.value.param == "previous_response_id"


def test_an_image_counts_as_media_and_not_for_bytes_per_token() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    ask = read({"model": "m", "messages": [{"role": "user", "content": [image]}]}).demand
    assert MEDIA_TOKENS <= ask.prompt_tokens < 2 * MEDIA_TOKENS
    assert ask.learnable_bytes == 0


def test_several_prompts_take_the_tokens_of_all_of_them() -> None:
    one, three = (read({"model": "m", "prompt": ["x" * 4000] * count}, b"/v1/completions").demand for count in (1, 3))
    assert (one.prompt_tokens, three.prompt_tokens) == (1000, 3000)
    assert one.tokens_of(len(one.keys)) == three.tokens_of(len(three.keys)) == 1000
    assert read({"model": "m", "prompt": [[1] * 50] * 3}, b"/v1/completions").demand.prompt_tokens == 150


@pytest.mark.parametrize(
    ("more", "reads_cache"),
    [({}, True), ({"prompt_logprobs": 1}, False), ({"echo": True, "logprobs": 1}, False), ({"logprobs": 1}, True)],
)
def test_engines_that_report_on_every_prompt_token_use_no_cache(more: dict[str, Any], reads_cache: bool) -> None:
    assert read({"model": "m", "prompt": "x" * 4000} | more, b"/v1/completions").demand.reads_cache is reads_cache


def test_lists_of_documents_may_be_cut_where_that_is_on() -> None:
    body = {"model": "gpt", "query": "q", "documents": ["a", "b"]}
    pairs = read(body, b"/v1/rerank").work
    assert isinstance(pairs, Pairs)
    assert (pairs.documents, pairs.fields) == (["a", "b"], {"model": "org/m"})
    assert read({"model": "m", "text_1": "q", "text_2": ["a"]}, b"/score").work is not None
    assert read(body, b"/pooling").work is None
    off = Config(backends=(BackendConfig(url="http://10.0.0.1:8000"),), embeddings=EmbeddingsConfig(coalesce=False))
    through = request_reader(off)
    assert read(body, b"/v1/rerank", through=through).work is None


@pytest.mark.parametrize(
    ("path", "document"),
    [
        (b"/v1/responses", {"messages": [], "prompt": "b", "input": "x" * 3000}),
        (b"/v1/completions", {"messages": [], "prompt": "x" * 3000, "input": "b"}),
        (b"/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3000}], "prompt": "b", "input": "b"}),
    ],
)
def test_the_prompt_is_read_where_the_endpoint_reads_it(path: bytes, document: dict[str, Any]) -> None:
    assert read(document | {"model": "m"}, path).demand.prompt_size >= 3000


@pytest.mark.parametrize("value", [["a"] * 100, {"a": 1}, 5, True])
def test_a_cache_key_that_is_no_string_is_the_backends_to_refuse(value: Any) -> None:
    assert read(CHAT | {"prompt_cache_key": value}).demand.hint == 0


def test_of_a_cache_key_the_first_1024_characters_count() -> None:
    one, same, other = (
        read(CHAT | {"prompt_cache_key": key}).demand.hint for key in ("x" * 1024, "x" * 5000, "x" * 1023)
    )
    assert one == same != other
