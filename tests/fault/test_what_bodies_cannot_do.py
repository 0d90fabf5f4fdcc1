"""What a body cannot do: make an engine fetch, connect, or speak of what is not its client's."""

import asyncio
from typing import Any

import orjson
import pytest

from gateway.core.request import InferenceRequest
from gateway.core.turns import Steps
from tests.clients import chat
from tests.fault.rig import running
from tests.scripted import ScriptedBackend

REMOTE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
SOURCE = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/latest"}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [SOURCE]}
MEDIA: list[tuple[bytes, dict[str, Any]]] = [
    (b"/v1/chat/completions", {"messages": [{"role": "user", "content": [REMOTE]}]}),
    (b"/v1/responses", {"messages": [], "input": [{"role": "user", "content": [REMOTE]}]}),
    (b"/v1/responses", {"input": [{"type": "function_call_output", "call_id": "1", "output": [REMOTE]}]}),
    (b"/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [TOOL_RESULT]}]}),
    (b"/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [SOURCE]}]}),
    (b"/score", {"data_1": {"content": [REMOTE]}, "data_2": "x"}),
    (b"/v1/score", {"queries": {"content": [REMOTE]}, "documents": ["x", "y"]}),
    (b"/rerank", {"query": "x", "documents": [{"content": [REMOTE]}, "y"]}),
    (b"/v1/embeddings", {"messages": [{"role": "user", "content": [REMOTE]}]}),
    (b"/pooling", {"data": {"data": "http://169.254.169.254/latest", "data_format": "url"}}),
    (b"/tokenize", {"messages": [{"role": "user", "content": [REMOTE]}]}),
]
STEERING = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1, "prompt_token_ids": [1, 2]}
INTERNAL = [
    {"kv_transfer_params": STEERING},
    {"ec_transfer_params": STEERING},
    {"vllm_xargs": {"kv_transfer_params": "x"}},
    {"request_id": "resp_1234"},
    {"logits_processors": ["os.system"]},
]


async def test_no_engine_fetches_what_a_body_names_by_url(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for path, document in MEDIA:
            answer = await under_test.ask(orjson.dumps({"model": "scripted"} | document), target=path)
            assert (answer.status, path) == (400, path)
            assert b"allow_media_urls" in answer.body
        assert backend.ledger == []


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/responses", b"/v1/messages", b"/v1/embeddings"])
async def test_no_field_of_a_body_reaches_into_an_engine(backend: ScriptedBackend, path: bytes) -> None:
    async with running(backend) as under_test:
        for fields in INTERNAL:
            document = {"model": "scripted", "messages": [], "input": "x"} | fields
            answer = await under_test.ask(orjson.dumps(document), target=path)
            assert (answer.status, path) == (400, path)
            assert b"Unsupported field" in answer.body
        assert backend.ledger == []


async def test_the_event_loop_turns_between_the_steps_of_reading_a_large_body(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        reader, log = under_test.gateway.core.reader, list[str]()
        read = reader.read_in_steps

        def logged(*args: Any) -> Steps[InferenceRequest]:
            steps = read(*args)
            while True:
                log.append("step")
                asyncio.get_running_loop().call_soon(log.append, "turn")
                try:
                    next(steps)
                except StopIteration as end:
                    result: InferenceRequest = end.value
                    return result
                yield

        reader.read_in_steps = logged  # type: ignore[method-assign]
        assert (await under_test.ask(chat("x" * 100_000))).status == 200
        assert len(log) >= 6
        assert log == ["step", "turn"] * (len(log) // 2)
