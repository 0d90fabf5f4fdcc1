"""Files of requests: what lines may look like, what of them is sent, and what is said of those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.workloads.bodies import BodyFile, DatasetError, first_body, parsed_line
from loadtest.workloads.prompts import BodyMaker, Endpoint, Prompt, SourceFile, Turn, WorkloadKind, WorkloadSpec
from loadtest.workloads.sources import source_of

USER = {"role": "user", "content": "one"}
SAID = {"role": "assistant", "content": "recorded"}
MORE = {"role": "user", "content": "two"}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def turns_of(path: Path, index: int = 0, kind: WorkloadKind = WorkloadKind.BODIES, **more: Any) -> list[Turn]:
    spec = WorkloadSpec(kind=kind, file=SourceFile(path=str(path), sha256=""), **more)
    return list(source_of(spec).turns(index))


def sent(prompt: Prompt, **maker: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BodyMaker(Endpoint.CHAT, "served", stream=True, **maker).body(prompt))
    return found


@pytest.mark.parametrize(
    ("line", "endpoint"),
    [
        ({"messages": [USER]}, Endpoint.CHAT),
        ({"prompt": "once"}, Endpoint.COMPLETIONS),
        ({"input": "a text"}, Endpoint.EMBEDDINGS),
        ({"input": [1, 2, 3]}, Endpoint.EMBEDDINGS),
        ({"input": [USER]}, Endpoint.RESPONSES),
        ({"input": "a question", "max_output_tokens": 5}, Endpoint.RESPONSES),
        ({"query": "q", "documents": ["d"]}, Endpoint.RERANK),
        ({"text_1": "a", "text_2": ["b"]}, Endpoint.SCORE),
        ({"url": "/v1/responses", "method": "POST", "body": {"input": "a question"}}, Endpoint.RESPONSES),
        ({"url": "https://api.example/v1/score", "body": {"queries": "a", "documents": "b"}}, Endpoint.SCORE),
    ],
)
def test_the_endpoint_follows_from_the_url_or_the_fields(line: dict[str, Any], endpoint: Endpoint) -> None:
    assert parsed_line(json.dumps(line).encode()).recorded.endpoint is endpoint


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "unexpected"),
        ("[1]", "not a JSON object"),
        ({"hello": 1}, "no request"),
        ({"messages": "hi"}, "not a list of messages"),
        ({"url": "/v1/files", "body": {}}, "is none of /v1/chat/completions"),
        ({"url": "/v1/score", "body": 3}, "body is not a JSON object"),
        ({"method": "GET", "url": "/v1/models", "body": {}}, "only POST"),
        ({"messages": [USER], "think_s": -1}, "think_s is not a number from 0"),
        ({"messages": [USER], "session_id": [1]}, "session_id"),
        ({"messages": [USER], "timestamp": 5}, "some lines have a timestamp"),
    ],
)
def test_a_line_that_cannot_be_sent_is_named_with_its_number(tmp_path: Path, line: Any, complaint: str) -> None:
    path = written(tmp_path, {"messages": [USER]}, "", line)
    with pytest.raises(DatasetError, match=complaint) as error:
        BodyFile(path, check=True)
    assert str(error.value).startswith(f"{path}:3: ")


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has no requests"):
        BodyFile(written(tmp_path, ""))
    with pytest.raises(DatasetError, match="No such file"):
        BodyFile(tmp_path / "none")


def test_other_files_are_not_taken_for_requests(tmp_path: Path) -> None:
    assert (
        first_body(written(tmp_path, {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": []})) is None
    )
    assert first_body(written(tmp_path, {"conversations": []})) is None
    assert first_body(written(tmp_path, [{"messages": [USER]}])) is None


def test_a_body_is_sent_as_it_is(tmp_path: Path) -> None:
    body = {
        "model": "own",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png,x"}}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "temperature": 0.7,
    }
    (turn,) = turns_of(written(tmp_path, body))
    assert sent(turn.prompt) == body | {"stream": False}
    assert sent(turn.prompt, cache_salt="s")["cache_salt"] == "s"
    assert sent(turn.prompt, cache_salt="s", extra={"cache_salt": "mine"})["cache_salt"] == "mine"
    asked = sent(turn.prompt, extra={"model": "other", "stream": True})
    assert (asked["model"], asked["stream_options"]) == ("other", {"include_usage": True})
    (turn,) = turns_of(written(tmp_path, {"messages": [USER], "cache_salt": "tenant"}))
    assert sent(turn.prompt)["model"] == "served"
    assert sent(turn.prompt, cache_salt="s")["cache_salt"] == "tenant s"


def test_lines_of_a_session_are_its_turns_and_get_the_answers_of_the_turns_before(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"session_id": "a", "messages": [USER]},
        {"messages": [MORE]},
        {"session_id": "a", "think_s": 2.5, "messages": [USER, SAID, MORE]},
        {"session_id": "a", "messages": [MORE]},
    )
    first, second, third = turns_of(path, think_seconds=1.0)
    assert (first.pause_seconds, second.pause_seconds) == (0.0, 2.5)
    assert third.pause_seconds > 0
    said = sent(second.prompt.after(("", "live")))["messages"]
    assert said == [USER, {"role": "assistant", "content": "live"}, MORE]
    assert sent(third.prompt.after(("", "live", "", "live too")))["messages"] == [MORE]
    assert [turn.prompt.recorded for turn in turns_of(path, 1)] != [None]


def test_calls_of_tools_stay_as_recorded(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "42"}
    path = written(tmp_path, {"messages": [USER, called, result, SAID, MORE]})
    turns = turns_of(path, kind=WorkloadKind.SESSIONS)
    assert [len(sent(turn.prompt)["messages"]) for turn in turns] == [1, 3, 5]
    said = sent(turns[2].prompt.after(("", "not this", "", "but this")))["messages"]
    assert said == [USER, called, result, {"role": "assistant", "content": "but this"}, MORE]


def test_a_conversation_that_ends_with_an_answer_is_sent_up_to_it(tmp_path: Path) -> None:
    path = written(tmp_path, {"messages": [{"role": "system", "content": "be kind"}, USER, SAID, MORE, SAID]})
    turns = turns_of(path, kind=WorkloadKind.SESSIONS)
    assert [len(sent(turn.prompt)["messages"]) for turn in turns] == [2, 4]


def test_times_count_from_the_first_request_whatever_the_order(tmp_path: Path) -> None:
    path = written(tmp_path, *({"timestamp": at, "messages": [USER]} for at in (5000, 4000, 6500)))
    assert list(BodyFile(path).arrivals_seconds) == [0.0, 1.0, 2.5]
    path = written(tmp_path, *({"timestamp": at, "messages": [USER]} for at in (4.5, 6)))
    assert list(BodyFile(path).arrivals_seconds) == [0.0, 1.5]


def test_conversations_of_sharegpt_may_be_json_lines(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "why"}, {"from": "gpt", "value": "because"}]
    path = written(tmp_path, {"conversations": said}, {"conversations": said})
    (turn,) = turns_of(path, kind=WorkloadKind.SHAREGPT)
    assert turn.prompt.tail == "why"
