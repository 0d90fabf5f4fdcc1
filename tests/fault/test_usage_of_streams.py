"""Tokens of every stream are counted, and clients see what they asked for, however engines print usage."""

import json
from typing import Any

import orjson
import pytest

from tests.clients import chat
from tests.fault.rig import UnderTest, running
from tests.scripted import ScriptedBackend
from tests.scripts import Step, chunk, head, last_chunk

TOLD = {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}
Events = list[dict[str, Any] | None]  # None = a comment


def content(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"object": "chunk", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


USAGE_LAST: Events = [content("a"), content("b", "stop"), {"object": "chunk", "choices": [], "usage": TOLD}]
NULL_BEFORE: Events = [
    content("a", usage=None), None, content("b", "stop", usage=None), {"object": "chunk", "choices": [], "usage": TOLD},
]  # fmt: skip
WITH_CONTENT: Events = [content("a"), content("b", "stop", usage=TOLD)]
IN_EACH: Events = [content("a", usage={**TOLD, "completion_tokens": 1}), content("b", "stop", usage=TOLD)]
ENGINES = {
    "vLLM": (USAGE_LAST, (",", ":"), b"\n"),
    "with spaces": (USAGE_LAST, (", ", ": "), b"\n"),
    "SGLang": (NULL_BEFORE, (",", ":"), b"\n"),
    "null and spaces": (NULL_BEFORE, (", ", ": "), b"\n"),
    "usage with the last content": (WITH_CONTENT, (",", ":"), b"\n"),
    "TensorRT-LLM": (IN_EACH, (",", ":"), b"\n"),
    "CRLF": (NULL_BEFORE, (", ", ": "), b"\r\n"),
}


def plays(events: Events, separators: tuple[str, str], line_end: bytes) -> list[Step]:
    """A stream, one event a chunk."""
    steps = [head(200)]
    for each in events:
        line = b": ping" if each is None else b"data: " + json.dumps(each, separators=separators).encode()
        steps.append(chunk(line + 2 * line_end))
    return [*steps, chunk(b"data: [DONE]" + 2 * line_end), last_chunk()]


def counted(under_test: UnderTest) -> tuple[float, float]:
    """Tokens of prompts and answers."""
    under_test.gateway.core.finished.settle()
    metrics = under_test.gateway.core.metrics
    return sum(metrics.prompt_tokens.values.values()), sum(metrics.completion_tokens.values.values())


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("engine", ENGINES)
async def test_a_chat_stream_is_counted_and_shows_usage_to_those_who_asked(
    backend: ScriptedBackend, engine: str, options: dict[str, bool] | None
) -> None:
    events, separators, line_end = ENGINES[engine]
    backend.plays(*plays(events, separators, line_end))
    asked = {} if options is None else {"stream_options": options}
    async with running(backend) as under_test:
        answer = await under_test.ask(chat(stream=True, **asked))
        assert answer.complete
        assert orjson.loads(backend.ledger[0].body)["stream_options"] == {"include_usage": True}
        lines = [line for line in answer.body.splitlines() if line]
        assert lines[-1] == b"data: [DONE]"
        assert (b": ping" in lines) == (None in events)
        seen = [orjson.loads(line[6:]) for line in lines[:-1] if line.startswith(b"data: ")]
        sent = [event for event in events if event is not None]
        if options != {"include_usage": True}:
            sent = [
                {name: value for name, value in event.items() if name != "usage" or value is None}
                for event in sent if event["choices"]
            ]  # fmt: skip
        assert seen == sent
        await under_test.comes_to_rest()
        assert counted(under_test) == (11, 2)


RESPONSES = (
    b'event: response.created\ndata: {"response": {"id": "resp_1", "usage": null, "user": "usage"}}\n\n',
    b'event: response.output_text.delta\ndata: {"delta": "a"}\n\n',
    b'event: response.completed\ndata: {"response": {"id": "resp_1", "usage": {"input_tokens": 11, '
    b'"input_tokens_details": {"cached_tokens": 0}, "output_tokens": 2}, "user": "usage"}}\n\n',
)
MESSAGES = (
    b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 11, "output_tokens": 0}}}\n\n',
    b'event: content_block_delta\ndata: {"delta": {"text": "a"}}\n\n',
    b'event: message_delta\ndata: {"delta": {}, "usage": {"output_tokens": 2}}\n\n',
    b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
)


@pytest.mark.parametrize(
    ("target", "field", "events"), [(b"/v1/responses", "input", RESPONSES), (b"/v1/messages", "messages", MESSAGES)]
)
async def test_streams_of_responses_and_messages_are_counted_by_their_last_events(
    backend: ScriptedBackend, target: bytes, field: str, events: tuple[bytes, ...]
) -> None:
    backend.plays(head(200), *map(chunk, events), last_chunk())
    body = orjson.dumps({"model": "scripted", "stream": True, field: [{"role": "user", "content": "Hello."}]})
    async with running(backend) as under_test:
        answer = await under_test.ask(body, target=target)
        assert (answer.complete, answer.body) == (True, b"".join(events))
        assert backend.ledger[0].body == body
        await under_test.comes_to_rest()
        assert counted(under_test) == (11, 2)
