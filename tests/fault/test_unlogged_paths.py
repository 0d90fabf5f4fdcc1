"""What clients write into paths and queries may be a secret: no log, metric, trace or page of the gateway has it."""

import orjson
from prometheus_client import CollectorRegistry, generate_latest

from tests.clients import Client, chat, request
from tests.fault.rig import holds
from tests.fault.test_tracing import traced
from tests.scripted import ScriptedBackend

SECRET = "sk-path-Canary-77ab"
TARGETS = [
    (method, target)
    for method in (b"GET", b"POST", b"DELETE", b"HEAD", b"OPTIONS")
    for target in (
        *("/{}", "/v1/{}", "/v1/chat/completions/{}", "/v1/chat/completions?api_key={}", "//{}/v1", "/%2e%2e/{}"),
        *("/v1/models/{}", "/v1/models?key={}", "/v1/responses/{}", "/v1/responses/{}/cancel", "/v1/files/{}"),
        *("/v1/files?after={}", "/v1/batches/{}", "/v1/batches/{}/cancel", "/livez?{}", "/invocations?{}"),
        *("http://{}/v1/chat/completions", "http://a/{}", "*{}", "/admin/{}", "/v1/realtime/{}", "/metrics?{}"),
        *("/v1/messages?beta={}", "/v1/embeddings?user={}", "/v1/responses/resp_1?include={}"),
    )
]
ADMIN = ("/{}", "/admin/{}", "/admin/queue?token={}", "/admin/backends/{}/drain", "/admin/dashboard/decisions/{}")


async def test_what_is_in_paths_and_queries_is_written_nowhere(backend: ScriptedBackend) -> None:
    async with traced(backend, sections={"server": {"admin": {"port": 0}}}) as (under_test, receiver):
        assert under_test.admin_port is not None
        for method, target in TARGETS:
            body = chat() if method == b"POST" else b""
            async with await under_test.client() as client:
                await client.send(request(body, method=method, target=target.format(SECRET).encode()))
                assert (await client.read()).startswith(b"HTTP/1.1 "), (method, target)
        for method in (b"GET", b"POST"):
            for target in ADMIN:
                async with await Client.connect(under_test.admin_port) as client:
                    await client.send(request(b"", method=method, target=target.format(SECRET).encode()))
                    assert (await client.read()).startswith(b"HTTP/1.1 "), (method, target)
        assert (await under_test.ask(chat(), b"x-request-id: the-last")).status == 200
        under_test.gateway.core.finished.settle()
        await holds(lambda: "the-last" in repr(receiver.spans), "the spans arrive")
        registry = CollectorRegistry()
        registry.register(under_test.gateway.core.metrics)
        recent = under_test.gateway.operators.recent
        shown = {
            "access log": under_test.log.getvalue().decode(),
            "log": repr(under_test.events),
            "metrics": generate_latest(registry).decode(),
            "recent requests": orjson.dumps([*recent.rows(), *recent.failed_rows()]).decode(),
            "spans": repr(receiver.spans),
        }
        assert "unknown_url" in shown["access log"]
        assert [what for what, text in shown.items() if SECRET in text] == []
