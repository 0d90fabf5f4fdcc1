"""What clients cannot reach: no path leads to a route of a backend that is not in the table, in whatever spelling."""

import orjson
import pytest

from tests.clients import EndOfConnection, chat, request
from tests.fault.rig import BACKEND_KEY, CLIENT_KEY, PROMPT_CANARY, running
from tests.scripted import ScriptedBackend
from tests.scripts import answer as answers
from tests.scripts import fin, hang

# Routes of vLLM that steer, unload, reveal or rewrite an engine.
DANGEROUS = [
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/pause",
    "/resume",
    "/is_paused",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/release_kv_cache_memory",
    "/server_info",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/abort_requests",
    "/fault_tolerance/apply",
    "/fault_tolerance/status",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/metrics",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/kv_event_sources",
    "/cohere/v2/chat",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/v1/decisions",
    "/v1/systemone",
    "/health/../sleep",
]

SPELLINGS = [
    "{0}",
    "/{0}",
    "//{0}",
    "/v1{0}",
    "/v1/..{0}",
    "/v1/%2e%2e{0}",
    "/v1/%2E%2E{0}",
    "/v1/.%2e{0}",
    "/v1/%252e%252e{0}",
    "/v1/x/../..{0}",
    "/v1/x/%2e%2e/%2e%2e{0}",
    "/v1/chat/completions/..%2f..%2f..{0}",
    "/v1/chat/completions/../../..{0}",
    "/v1/chat/completions/..;/..;/..{0}",
    "/v1/chat/completions;{0}",
    "/v1/chat/completions%00{0}",
    "/v1/chat/completions\\..\\..\\..{0}",
    "/v1/..\\{0}",
    "/v1/%5c..{0}",
    "/v1/%c0%ae%c0%ae{0}",
    "/v1/%u002e%u002e{0}",
    "/./{0}",
    "/.{0}",
    "{0}/",
    "{0}/.",
    "{0}//",
    "{0}%20",
    "{0}%00",
    "{0};x",
    "{0}%3f",
    "{0}#",
    "/%2f{0}",
    "/v1/models/..{0}",
    "/v1/models/%2e%2e/%2e%2e{0}",
    "/v1/responses/..{0}",
    "/v1/responses/../..{0}/cancel",
    "/v1/responses/%2e%2e%2f..{0}",
    "http://127.0.0.1{0}",
    "http://a@127.0.0.1{0}",
    "//127.0.0.1{0}",
    "/v1/chat/completions?/..{0}",
    "/v1/chat/completions/%2e%2e?x={0}",
]


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH"])
async def test_no_spelling_of_a_path_reaches_a_dangerous_route(backend: ScriptedBackend, method: bytes) -> None:
    spellings = SPELLINGS if method in (b"GET", b"POST") else SPELLINGS[:6]
    reachable = {b"/v1/chat/completions"}
    async with running(backend) as under_test:
        client = await under_test.client()
        for route in DANGEROUS:
            for spelling in spellings:
                for target in (spelling.format(route), spelling.format(route.upper())):
                    try:
                        await client.send(
                            b"%b %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}" % (method, target.encode())
                        )
                        answer = await client.answer()
                    except EndOfConnection:
                        client.close()
                        client = await under_test.client()
                        continue
                    is_model = method == b"GET" and target.startswith("/v1/models")
                    if target.partition("?")[0].encode() in reachable and method == b"POST":
                        assert answer.status == 200
                    else:
                        assert 400 <= answer.status < 500, (method, target, answer)
                    assert is_model or answer.status != 500
                    client.close()
                    client = await under_test.client()
        client.close()
        assert {seen.target for seen in backend.ledger} <= reachable
        assert {seen.method for seen in backend.ledger} <= {b"POST"}


async def test_only_the_paths_of_the_table_reach_a_backend_and_as_they_stand_there(backend: ScriptedBackend) -> None:
    targets = [
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
        b"/v1/messages",
        b"/v1/score",
        b"/score",
        b"/v1/rerank",
        b"/rerank",
        b"/v2/rerank",
        b"/pooling",
        b"/classify",
        b"/tokenize",
        b"/detokenize",
        b"/v1/messages/count_tokens",
    ]
    body = b'{"model":"scripted","messages":[],"prompt":"x","input":"x","query":"q","documents":["d"]}'
    async with running(backend) as under_test:
        for target in targets:
            answer = await under_test.ask(body, target=target + b"?api-version=../../sleep")
            assert answer.status == 200, target
            assert backend.ledger[-1].target == target
        for target in targets:
            assert (await under_test.ask(method=b"GET", target=target)).status == 405


async def test_responses_of_others_and_unknown_ones_cannot_be_read_or_cancelled(backend: ScriptedBackend) -> None:
    keys = [{"name": "a", "key": CLIENT_KEY}, {"name": "b", "key": "sk-other"}]
    backend.plays(answers(200, {"id": "resp_1234", "object": "response", "status": "completed"}))
    as_a, as_b = b"authorization: Bearer " + CLIENT_KEY.encode(), b"authorization: Bearer sk-other"
    async with running(backend, sections={"auth": {"keys": keys}}) as under_test:
        await under_test.ask(b'{"model":"scripted","input":"x","store":true}', as_a, target=b"/v1/responses")
        before = len(backend.ledger)
        for target, method in ((b"/v1/responses/resp_1234", b"GET"), (b"/v1/responses/resp_1234/cancel", b"POST")):
            assert (await under_test.ask(b"", as_b, method=method, target=target)).status == 404
            assert (await under_test.ask(b"", as_b, method=method, target=target.replace(b"1234", b"9"))).status == 404
            assert len(backend.ledger) == before
        assert (await under_test.ask(b"", as_a, method=b"GET", target=b"/v1/responses/resp_1234")).status == 200
        assert backend.ledger[-1].target == b"/v1/responses/resp_1234"


HOSTS = [
    b"a?",
    b"a/#",
    b"evil@a",
    b"a:99999",
    b"127.0.0.1:1",
    b"a b",
    b"",
    b"[::1",
    b"a\xff",
    b"sleep",
    b"a,b",
    b"a/../sleep",
]


async def test_the_host_header_decides_nothing_and_never_travels_on(backend: ScriptedBackend) -> None:
    keys = {"auth": {"keys": [{"name": "a", "key": CLIENT_KEY}]}}
    with_key = b"authorization: Bearer " + CLIENT_KEY.encode()
    async with running(backend, sections=keys) as under_test:
        for host in HOSTS:
            data = request(chat(), with_key).replace(b"host: gateway", b"host: " + host)
            without = request(chat()).replace(b"host: gateway", b"host: " + host)
            for bytes_sent, expected in ((data, (200, 400)), (without, (401, 400))):
                async with await under_test.client() as client:
                    await client.send(bytes_sent)
                    assert (await client.answer()).status in expected, host
        own = backend.url.removeprefix("http://").encode()
        assert {seen.header(b"host") for seen in backend.ledger} == {own}


BAD_KEYS = {
    "none": (),
    "empty": (b"authorization: Bearer ",),
    "only the scheme": (b"authorization: Bearer",),
    "wrong": (b"authorization: Bearer sk-wrong",),
    "prefix": (b"authorization: Bearer " + CLIENT_KEY[:-1].encode(),),
    "longer": (b"authorization: Bearer " + CLIENT_KEY.encode() + b"x",),
    "upper case": (b"authorization: Bearer " + CLIENT_KEY.upper().encode(),),
    "basic": (b"authorization: Basic " + CLIENT_KEY.encode(),),
    "no scheme": (b"authorization: " + CLIENT_KEY.encode(),),
    "digest": (b"authorization: Digest " + CLIENT_KEY.encode(),),
    "non-ASCII": (b"authorization: Bearer \xff\xfe",),
    "Unicode": ("authorization: Bearer ключ".encode(),),
    "comma": (b"authorization: Bearer x, Bearer " + CLIENT_KEY.encode(),),
    "the backend's": (b"authorization: Bearer " + BACKEND_KEY.encode(),),
    "8,000 bytes": (b"authorization: Bearer " + b"x" * 8000,),
    "wrong api key": (b"x-api-key: wrong",),
    "in a cookie": (b"cookie: authorization=" + CLIENT_KEY.encode(),),
    "forwarded": (b"x-forwarded-authorization: Bearer " + CLIENT_KEY.encode(),),
    "proxy": (b"proxy-authorization: Bearer " + CLIENT_KEY.encode(),),
    "quoted": (b'authorization: Bearer "' + CLIENT_KEY.encode() + b'"',),
    "null": (b"authorization: Bearer null",),
}


async def test_every_wrong_key_gets_the_same_401(backend: ScriptedBackend) -> None:
    keys = {"auth": {"keys": [{"name": "a", "key": CLIENT_KEY}]}}
    async with running(backend, sections=keys) as under_test:
        bodies = set()
        for name, headers in BAD_KEYS.items():
            for target in (b"/v1/chat/completions", b"/v1/embeddings", b"/tokenize", b"/score"):
                answer = await under_test.ask(chat(PROMPT_CANARY), *headers, target=target)
                assert answer.status == 401, (name, target)
                assert answer.header("www-authenticate") == "Bearer"
                bodies.add(answer.body)
            for target in (b"/v1/models", b"/v1/models/scripted", b"/v1/responses/resp_1"):
                assert (await under_test.ask(b"", *headers, method=b"GET", target=target)).status == 401, (name, target)
        assert len(bodies) == 1
        assert backend.ledger == []


@pytest.mark.parametrize(
    "header",
    [
        b"authorization: Bearer %b",
        b"Authorization: bearer %b",
        b"AUTHORIZATION: BEARER %b",
        b"x-api-key: %b",
        b"authorization: Bearer  %b ",
    ],
)
async def test_the_right_key_opens_and_never_travels_on(backend: ScriptedBackend, header: bytes) -> None:
    keys = {"auth": {"keys": [{"name": "a", "key": CLIENT_KEY}]}}
    async with running(backend, sections=keys) as under_test:
        assert (await under_test.ask(chat(), header % CLIENT_KEY.encode())).status == 200
        (seen,) = backend.ledger
        assert CLIENT_KEY.encode() not in seen.head
        assert seen.header(b"authorization") == b"Bearer " + BACKEND_KEY.encode()
        assert seen.header(b"x-api-key") is None


async def test_two_keys_in_one_request_are_refused(backend: ScriptedBackend) -> None:
    right = b"authorization: Bearer " + CLIENT_KEY.encode()
    keys = {"auth": {"keys": [{"name": "a", "key": CLIENT_KEY}]}}
    async with running(backend, sections=keys) as under_test:
        for headers in ((right, b"authorization: Bearer x"), (b"authorization: Bearer x", right), (right, right)):
            assert (await under_test.ask(chat(), *headers)).status in (400, 401)
        assert backend.ledger == []


NOT_FORWARDED = [
    b"connection: x-secret, authorization",
    b"keep-alive: timeout=1000",
    b"proxy-authorization: Basic x",
    b"te: trailers",
    b"trailer: x",
    b"proxy-connection: keep-alive",
    b"x-secret: 1",
    b"cookie: a=b",
    b"x-forwarded-for: 1.2.3.4",
    b"x-real-ip: 1.2.3.4",
    b"forwarded: for=1.2.3.4",
    b"x-forwarded-host: evil",
    b"x-original-url: /sleep",
    b"x-rewrite-url: /sleep",
    b"x-http-method-override: DELETE",
    b"openai-organization: org",
    b"openai-project: p",
    b"accept-encoding: gzip, br",
    b"user-agent: evil",
    b"origin: http://evil",
    b"referer: http://evil",
    b"range: bytes=0-1",
    b"x-gateway-backend: other",
    b"if-none-match: x",
    b"x-sim-script: {}",
    b"expect: 100-continue",
    b"priority: u=0",
]


async def test_headers_of_a_client_stay_here(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for header in NOT_FORWARDED:
            assert (await under_test.ask(chat(), header)).status == 200
            head = backend.ledger[-1].head.lower()
            value = header.partition(b": ")[2]
            assert value not in head.replace(b"accept-encoding: identity", b"") or value in (b"1", b"x", b"p"), header
            assert {name for name, _ in backend.ledger[-1].headers} == {
                b"host",
                b"accept-encoding",
                b"authorization",
                b"x-request-id",
                b"content-type",
                b"content-length",
            }


INJECTIONS = [
    b"a\rb",
    b"a\x0bb",
    b"x" * 129,
    b"a b",
    b"a,b",
    b"a;b",
    b'a"b',
    b"<script>",
    b"\xff\xfe",
    "ид".encode(),
    b"a\tb",
    b"../../x",
    b"%0d%0aset-cookie:x",
    b"${jndi:ldap://x}",
    b"a'b",
    b"{}",
]


async def test_request_ids_and_trace_headers_inject_nothing(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for value in INJECTIONS:
            for name in (b"x-request-id", b"traceparent", b"tracestate", b"x-session-id"):
                answer = await under_test.ask(chat(), name + b": " + value)
                assert answer.status in (200, 400)
                assert answer.header("set-cookie") is None
                assert (answer.header("x-request-id") or "").replace("-", "").isalnum()
        for seen in backend.ledger:
            assert seen.request_id.replace("-", "").isalnum()
            assert b"\xff" not in seen.head
        assert (await under_test.ask(chat(), b"x-request-id: my-id.1:2_3")).header("x-request-id") == "my-id.1:2_3"
        assert backend.ledger[-1].request_id == "my-id.1:2_3"


async def test_names_of_models_inject_nothing(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for model in [
            "a\r\nset-cookie: x=y",
            "a\nb",
            "../../sleep",
            "\u202e",
            "\U0001f600",
            "a\0b",
            "x" * 1000,
            "<b>",
            "%s%n",
        ]:
            answer = await under_test.ask(chat(model=model))
            assert answer.status == 404
            assert answer.error["code"] == "model_not_found"
            assert answer.header("set-cookie") is None
            path = b"/v1/models/" + "".join(f"%{byte:02x}" for byte in model.encode("utf-8", "replace")).encode()
            assert (await under_test.ask(b"", method=b"GET", target=path[:500])).status == 404
        under_test.gateway.core.finished.settle()
        labels = {label for labels in under_test.gateway.core.metrics.requests.values for label in labels}
        assert labels <= {"chat", "model", "models", "unknown", "", "rejected", "completed", *labels & {"other"}}


async def test_models_that_clients_make_up_do_not_grow_the_metrics(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        for number in range(1500):
            await client.send(request(chat(model=f"made-up-{number}")))
            assert (await client.answer()).status == 404
        under_test.gateway.core.finished.settle()
        assert len(under_test.gateway.core.metrics.requests.values) < 5


async def test_a_prompt_is_never_told_to_logs_or_errors(backend: ScriptedBackend) -> None:
    sections = {"upstream": {"idle_stream_timeout_seconds": 1, "first_byte_timeout_seconds": 1}}
    async with running(backend, sections=sections) as under_test:
        body = chat(PROMPT_CANARY)
        for broken in (body[:-1], body + b"x", body.replace(b"scripted", b"nobody"), body.replace(b'"user"', b"NaN")):
            answer = await under_test.ask(broken)
            assert answer.status in (400, 404)
            assert PROMPT_CANARY.encode() not in answer.body
        for steps in ((fin(),), (hang(),)):
            backend.plays(*steps)
            answer = await under_test.ask(body)
            assert answer.status in (502, 504)
            assert PROMPT_CANARY.encode() not in answer.body
            assert BACKEND_KEY.encode() not in answer.body


@pytest.mark.parametrize(
    "salt",
    [
        b"",
        b',"cache_salt":"chosen"',
        b',"cache_\\u0073alt":"chosen"',
        b',"cache_\\u0073alt":"chosen","metadata":{"cache_salt":"x"}',
        b',"metadata":{"cache_salt":"x"}',
    ],
)
async def test_a_client_whose_cache_is_kept_apart_cannot_choose_its_salt(backend: ScriptedBackend, salt: bytes) -> None:
    keys = [
        {"name": "a", "key": CLIENT_KEY, "isolate_cache": True},
        {"name": "b", "key": "sk-other", "isolate_cache": True},
    ]
    body = chat()[:-1] + salt + b"}"
    async with running(backend, sections={"auth": {"keys": keys}}) as under_test:
        salts = []
        for key in (CLIENT_KEY, CLIENT_KEY, "sk-other"):
            assert (await under_test.ask(body, b"authorization: Bearer " + key.encode())).status == 200
            salts.append(orjson.loads(backend.ledger[-1].body)["cache_salt"])
        assert "chosen" not in salts
        assert salts[0] == salts[1] != salts[2]
