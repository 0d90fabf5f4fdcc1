"""Keys over their life: they come and go with their file, they expire, and each may use its models."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.clients import chat, request
from tests.fault.rig import UnderTest, holds, running
from tests.fault.test_rate_limits import AS_CLIENT, AS_FORM, FORM, limited
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import hang, json_answer, stream

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
            await holds(lambda: under_test.gateway.client_keys.names == ["bob"], "the new keys")
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
    async with running(backend, sections=limited(tokens_per_day=50, tokens_per_month=1000)) as under_test:
        body = chat(stream=True, max_tokens=20)
        for used in (8, 16, 24):  # usage says 5 + 3
            assert (await under_test.ask(body, AS_CLIENT)).is_done
            assert f"{used}/50 a day, {used}/1000 a month" in repr(under_test.gateway.handler._rate_limits["limited"])
        refused = await under_test.ask(chat(max_tokens=40), AS_CLIENT)
        assert (refused.status, refused.error["type"], refused.error["code"]) == (429, *["insufficient_quota"] * 2)
        assert "26 remain" in refused.error["message"]
        assert 0 < int(refused.header("retry-after") or 0) <= 86400
        assert refused.header("x-should-retry") == "false"
        anthropic = await under_test.ask(chat(max_tokens=40), AS_CLIENT, target=b"/v1/messages")
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
