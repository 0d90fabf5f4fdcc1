"""What clients act on in a refusal, in each dialect: its status, its code, and the words that they look for."""

from typing import Any

import orjson
import pytest

from tests.clients import Answer
from tests.fault.rig import running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import answer

TURNS = [{"role": "user", "content": "Hello."}]
DIALECTS: dict[bytes, dict[str, Any]] = {
    b"/v1/chat/completions": {"messages": TURNS},
    b"/v1/completions": {"prompt": "a"},
    b"/v1/responses": {"input": "a", "store": False},
    b"/v1/embeddings": {"input": "a", "user": None, "priority": 1},
    b"/v1/messages": {"messages": TURNS, "max_tokens": 9},
    b"/v1/messages/count_tokens": {"messages": TURNS},
}
LENGTHS = [
    "This model's maximum context length is 8192 tokens. However, your prompt contains at least 8193 input tokens,"
    " which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    " (parameter=input_tokens, value=8193)",
    "Input length (8193) exceeds model's maximum context length (8192).",
]


def body_of(path: bytes, **more: Any) -> bytes:
    return orjson.dumps({"model": MODEL} | DIALECTS[path] | more)


def error_of(path: bytes, found: Answer) -> dict[str, Any]:
    """The error; Anthropic's has a type and a message alone."""
    if b"/messages" in path:
        assert set(found.json) == {"type", "error"}
        assert set(found.json["error"]) == {"type", "message"}
        return dict(found.json["error"])
    return found.error


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("message", LENGTHS)
async def test_a_prompt_beyond_the_context_is_one_that_clients_compact(
    backend: ScriptedBackend, path: bytes, message: str
) -> None:
    shown = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}
    if b"/messages" in path:
        backend.plays(answer(400, {"type": "error", "error": {"type": "BadRequestError", "message": message}}))
    else:
        backend.plays(answer(400, {"error": shown}))
    async with running(backend) as under_test:
        for streams in (False, True):
            found = await under_test.ask(body_of(path, **({"stream": True} if streams else {})), target=path)
            error = error_of(path, found)
            assert found.status == 400
            if b"/messages" in path:
                assert error["type"] == "invalid_request_error"
                assert error["message"].startswith("prompt is too long: 8193 tokens > 8192 maximum. ")
                assert error["message"].endswith(message)
            else:
                assert error == shown | {"code": "context_length_exceeded"}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("status", [400, 404])
async def test_other_refusals_of_a_backend_stay_as_they_are(backend: ScriptedBackend, path: bytes, status: int) -> None:
    shown = {"error": {"message": "Neither found. nor valid", "type": "BadRequestError", "param": "x", "code": status}}
    backend.plays(answer(status, shown))
    async with running(backend) as under_test:
        found = await under_test.ask(body_of(path), target=path)
        assert (found.status, found.json) == (status, shown)


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_body_that_is_too_large_or_too_complex_says_so(backend: ScriptedBackend, path: bytes) -> None:
    server = {"max_body_bytes": 20_000, "max_json_containers": 40, "max_json_strings": 200, "max_json_values": 300}
    too_much: list[Any] = [[{}] * 100, ["a"] * 300, [1, "a"] * 90 + [1] * 400, [[[[[]]]]] * 3 + [[] for _ in range(60)]]
    async with running(backend, sections={"server": server}) as under_test:
        for given in too_much:
            found = await under_test.ask(body_of(path, metadata={"x": given}), target=path)
            error = error_of(path, found)
            assert found.status == 400
            assert "prompt is too long" in error["message"]
            assert error.get("code", "context_too_complex") == "context_too_complex"
        found = await under_test.ask(body_of(path, metadata={"x": "a" * 30_000}), target=path)
        error = error_of(path, found)
        assert found.status == 413
        assert "request_too_large" in (error.get("code"), error["type"])


CONTINUED = [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}]


@pytest.mark.parametrize("more", CONTINUED)
@pytest.mark.parametrize("response_id", ["resp_unknown", "", "x" * 900, "resp_'\"\n"])
async def test_an_unknown_response_to_continue_has_openais_code(
    backend: ScriptedBackend, more: dict[str, Any], response_id: str
) -> None:
    async with running(backend) as under_test:
        body = body_of(b"/v1/responses", previous_response_id=response_id, **more)
        found = await under_test.ask(body, target=b"/v1/responses")
        assert found.status == 400
        assert found.error["code"] == "previous_response_not_found"
        assert found.error["param"] == "previous_response_id"
        assert found.error["message"].startswith("Previous response with id ")
        assert found.error["message"].endswith(" not found.")
        assert backend.ledger == []


@pytest.mark.parametrize(("method", "target"), [(b"GET", b""), (b"GET", b"?stream=true"), (b"POST", b"/cancel")])
async def test_an_unknown_response_is_not_found(backend: ScriptedBackend, method: bytes, target: bytes) -> None:
    async with running(backend) as under_test:
        found = await under_test.ask(b"", method=method, target=b"/v1/responses/resp_unknown" + target)
        assert found.status == 404
        assert found.error == {
            "message": "Response with id 'resp_unknown' not found.", "type": "invalid_request_error", "param": None,
            "code": "response_not_found",
        }  # fmt: skip


async def test_a_response_that_its_backend_has_lost_is_unknown_in_the_same_words(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        made = {"id": "resp_1", "object": "response", "status": "completed", "output": []}
        backend.plays_once(answer(200, made))
        await under_test.ask(body_of(b"/v1/responses", store=True), target=b"/v1/responses")
        lost = {"message": "Response with id 'resp_1' not found.", "type": "invalid_request_error", "code": 404}
        backend.plays(answer(404, {"error": lost | {"param": "response_id"}}))
        body = body_of(b"/v1/responses", previous_response_id="resp_1")
        found = await under_test.ask(body, target=b"/v1/responses")
        assert (found.status, found.error["code"]) == (400, "previous_response_not_found")
        assert found.error["param"] == "previous_response_id"
        assert found.error["message"] == "Previous response with id 'resp_1' not found."
        looked_up = await under_test.ask(b"", method=b"GET", target=b"/v1/responses/resp_1")
        assert (looked_up.status, looked_up.error["message"]) == (404, lost["message"])
