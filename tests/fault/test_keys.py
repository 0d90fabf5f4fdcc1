"""Keys over their life: they come and go with their file, they expire, and each may use its models."""

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.clients import Client, chat, request
from tests.fault.restartable import Restartable, restartable
from tests.fault.rig import UnderTest, holds, running
from tests.fault.test_rate_limits import AS_CLIENT, AS_FORM, FORM, STREAM, limited
from tests.fault.test_restarts import stops
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import chunk, hang, head, json_answer, last_chunk, stream, until

AS_ANN = b"authorization: Bearer sk-ann"


def write(file: Path, *entries: dict[str, Any]) -> None:
    """Replace the keys file; the secret of a key is `sk-` and its name."""
    listed = [{"key_sha256": sha256(f"sk-{each['name']}".encode()).hexdigest(), **each} for each in entries]
    file.with_suffix(".new").write_text(str(listed))
    file.with_suffix(".new").replace(file)


async def status(under_test: UnderTest, *headers: bytes) -> int:
    return (await under_test.ask(chat(), *headers)).status


async def test_keys_come_and_go_with_their_file_and_requests_in_flight_stay(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    file = tmp_path / "keys.yaml"
    write(file, {"name": "ann", "requests_per_minute": 3})
    async with running(backend, sections={"auth": {"keys_file": str(file)}}) as under_test:
        assert await status(under_test) == 401
        assert await status(under_test, AS_ANN) == 200
        backend.plays(hang())
        async with await under_test.client() as client:
            await client.send(request(chat(), AS_ANN))
            await holds(lambda: under_test.in_flight == 1, "a request in flight")
            write(file, {"name": "bob"})
            await holds(lambda: under_test.gateway.features["keys"].client_keys.names == ["bob"], "the new keys")
            assert under_test.in_flight == 1
        backend.plays(*json_answer())
        assert await status(under_test, AS_ANN) == 401
        assert await status(under_test, b"x-api-key: sk-bob") == 200


async def test_an_expired_key_is_refused_and_says_so(backend: ScriptedBackend) -> None:
    async with running(backend, sections=limited(expires_at="2020-01-01T00:00:00Z")) as under_test:
        refused = await under_test.ask(chat(), AS_CLIENT)
        assert (refused.status, refused.error["code"]) == (401, "expired_api_key")
        assert refused.error["type"] == "authentication_error"
        assert refused.header("www-authenticate") == 'Bearer error="invalid_token"'
        assert (await under_test.ask(chat(), b"x-api-key: sk-free")).status == 200


async def test_a_budget_is_what_usage_reports_and_ends_with_the_period(backend: ScriptedBackend) -> None:
    backend.plays(*stream(3))
    async with running(backend, sections=limited(tokens_per_day=28, tokens_per_month=1000)) as under_test:
        body = chat(stream=True, max_tokens=3)
        for used in (8, 16, 24):  # usage says 5 + 3
            assert (await under_test.ask(body, AS_CLIENT)).is_done
            assert f"{used}/28 a day, {used}/1000 a month" in repr(under_test.gateway.core.ledger.limits["limited"])
        refused = await under_test.ask(chat(max_tokens=10), AS_CLIENT)
        assert (refused.status, refused.error["type"], refused.error["code"]) == (429, *["insufficient_quota"] * 2)
        assert "4 remain" in refused.error["message"]
        assert 0 < int(refused.header("retry-after") or 0) <= 86400
        assert refused.header("x-should-retry") == "false"
        anthropic = await under_test.ask(chat(max_tokens=10), AS_CLIENT, target=b"/v1/messages")
        assert anthropic.json["error"]["type"] == "rate_limit_error"
        assert under_test.outcomes == {"completed": 3, "quota_exceeded": 2}
        assert (await under_test.ask(body, b"x-api-key: sk-free")).is_done


async def test_a_key_may_use_its_models_by_the_names_that_clients_use(backend: ScriptedBackend) -> None:
    sections = {**limited(models=["gpt-*"]), "models": {"aliases": {"gpt-4": MODEL, "llama": MODEL}}}
    async with running(backend, sections=sections) as under_test:
        assert (await under_test.ask(chat(model="gpt-4"), AS_CLIENT)).status == 200
        for body, path, header in (
            (chat(model="llama"), b"/v1/chat/completions", b"x-gateway-explain: 1"),
            (chat(), b"/v1/chat/completions", b"x-a: b"),
            (b'{"messages":[]}', b"/v1/chat/completions", b"x-a: b"),
            (b'{"messages":[]}', b"/invocations", b"x-a: b"),
            (b'{"input":"a","model":"%b"}' % MODEL.encode(), b"/v1/embeddings", b"x-a: b"),
            (b'{"prompt":"%b"}' % (b"a" * 100_000), b"/tokenize", b"x-a: b"),
            (FORM % b"x", b"/v1/audio/transcriptions", AS_FORM),
        ):
            refused = await under_test.ask(body, AS_CLIENT, header, target=path)
            assert (refused.status, refused.error["code"]) == (403, "model_not_found"), path
            assert refused.error["type"] == "invalid_request_error"
            assert refused.header("x-should-retry") == "false"
        asked = await under_test.ask(b"", AS_CLIENT, method=b"GET", target=b"/tokenizer_info")
        assert asked.status == 403
        anthropic = await under_test.ask(chat(model="llama"), AS_CLIENT, target=b"/v1/messages")
        assert anthropic.json["error"]["type"] == "permission_error"
        listed = await under_test.ask(b"", AS_CLIENT, method=b"GET", target=b"/v1/models")
        assert [card["id"] for card in listed.json["data"]] == ["gpt-4"]
        assert len(backend.ledger) == 1


async def usage_of(gateway: Restartable) -> list[tuple[Any, ...]]:
    rows = (await gateway.asks_admin("/admin/usage", b"GET")).json["rows"]
    return [tuple(row.values()) for row in rows]


async def test_usage_is_shown_by_key_and_model_and_in_metrics(backend: ScriptedBackend) -> None:
    backend.plays(*stream(3))
    sections = {**limited(), "server": {"admin": {"port": 0}}}
    async with running(backend, sections=sections) as under_test:
        for _ in range(2):
            assert (await under_test.ask(STREAM, AS_CLIENT)).is_done
        await under_test.ask(b"{", AS_CLIENT)
        await under_test.ask(b"", AS_CLIENT, method=b"GET", target=b"/v1/models")
        await under_test.ask(STREAM, b"x-api-key: wrong")

        async def admin(target: bytes) -> Any:
            async with await Client.connect(under_test.admin_port or 0) as client:
                await client.send(request(method=b"GET", target=target).replace(b"host: gateway", b"host: localhost"))
                return await client.answer()

        document = (await admin(b"/admin/usage")).json
        counts = {"requests": 2, "prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": 6, "errors": 0}
        assert document["rows"] == [
            {"key": "limited", "model": "", **dict.fromkeys(counts, 0), "requests": 1, "errors": 1},
            {"key": "limited", "model": MODEL, **counts},
        ]
        assert document["total"] == {**counts, "requests": 3, "errors": 1}
        assert document["since"].endswith("-01")
        assert document["last_used"] == {"limited": document["until"]}
        by_day = (await admin(b"/admin/usage?by=day&since=2026-01-01")).json
        assert by_day["rows"][0]["day"] == by_day["until"] == by_day["counted_since"]
        wrong = await admin(b"/admin/usage?since=yesterday")
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "since")
        assert b'gateway_key_tokens_total{key="limited",kind="completion"} 6.0' in (await admin(b"/metrics")).body


async def test_usage_and_budgets_go_on_when_the_gateway_is_restarted_and_started_again(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    end = asyncio.Event()
    first = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":30}}\n\n'
    pieces = [chunk(each) for each in (first, usage, b"data: [DONE]\n\n")]
    state, auth = {"path": str(tmp_path / "state")}, limited(tokens_per_day=100)["auth"]
    async with restartable(tmp_path, backend, auth=auth, state=state) as gateway:
        backend.plays_once(*stream(3))
        assert (await gateway.ask(STREAM, AS_CLIENT)).is_done
        backend.plays_once(head(200), pieces[0], until(end), *pieces[1:], last_chunk())
        async with await gateway.client() as streaming:
            await streaming.send(request(STREAM, AS_CLIENT))
            await holds(lambda: backend.running == 1, "the stream runs")
            old = gateway.processes[0].pid
            await gateway.restart()
            assert await usage_of(gateway) == [("limited", MODEL, 1, 5, 0, 3, 0)]
            end.set()
            assert (await streaming.answer()).is_done
            await gateway.ended(old)
        async with asyncio.timeout(20):
            while await usage_of(gateway) != [("limited", MODEL, 2, 45, 0, 33, 0)]:
                await asyncio.sleep(0.01)
        body = chat("x" * 200, max_tokens=1)
        refused = await gateway.ask(body, AS_CLIENT)
        assert (refused.status, "22 remain" in refused.error["message"]) == (429, True)  # 8 and 70 were used
        await stops(gateway)
        gateway.start()
        await gateway.ready()
        refused = await gateway.ask(body, AS_CLIENT)
        assert (refused.status, "22 remain" in refused.error["message"]) == (429, True)
        assert (await usage_of(gateway))[0][2:] == (4, 45, 0, 33, 2)
