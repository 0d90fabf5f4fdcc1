from typing import Any

import orjson
import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.front.json_body import refuse_remote_media

INLINE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REMOTE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
SOURCE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


def asking(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "look"}, {"role": "user", "content": list(parts)}]}


def refuse(document: dict[str, Any], *, generates: bool = True) -> None:
    left: list[Any] = [document]
    while left:
        refuse_remote_media(document, left, generates=generates)


@pytest.mark.parametrize(
    "part",
    [
        REMOTE,
        {"type": "image_url", "image_url": {"url": "HTTPS://example.org/a.png"}},
        {"type": "image_url", "image_url": "http:\\\\127.0.0.1\\x"},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "audio_url", "audio_url": {"url": " data:,x"}},
        {"type": "input_image", "image_url": "https://example.org/a.png"},
        {"image_url": "https://example.org/a.png", "uuid": "a"},
        {"type": "input_file", "file_url": "https://example.org/a.pdf"},
        {"type": "image", "image": "https://example.org/a.png"},
        {"type": "video", "video": ["https://example.org/1.png", "https://example.org/2.png"]},
        {"type": "video", "url": "https://example.org/1.mp4"},
        {"image_urls": ["data:,a", "https://example.org/a.png"]},
        SOURCE,
    ],
)
def test_media_that_is_not_in_the_request_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="allow_media_urls"):
        refuse(asking({"type": "text", "text": "see"}, INLINE, part))
    with pytest.raises(InvalidRequest):
        refuse({"input": [{"role": "user", "content": [part]}]})


@pytest.mark.parametrize(
    "document",
    [
        {"messages": [], "input": [{"role": "user", "content": [REMOTE]}]},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": [REMOTE]}]},
        {"input": [{"type": "computer_call_output", "output": {"image_url": "http://a/b"}}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [SOURCE]}]}]},
        {"system": [SOURCE], "messages": []},
        {"data_1": {"content": [REMOTE]}, "data_2": "x"},
        {"queries": {"content": [REMOTE]}, "documents": ["x"]},
        {"query": "x", "documents": ["a", {"content": [REMOTE]}]},
        {"query": "x", "documents": {"content": [REMOTE]}},
        {"messages": [[{"role": "user", "content": [REMOTE]}]]},
        {"data": {"data": "http://a/b", "data_format": "url"}},
        {"data": {"data": "/etc/passwd", "data_format": "path"}},
        {"type": "tool_use", "input": [{"role": "user", "content": [REMOTE]}]},
        {"text": [{"content": [REMOTE]}]},
        {"x": {"y": [[{"z": {"url": "http://a/b"}}]]}},
    ],
)
def test_it_is_refused_wherever_it_stands(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="allow_media_urls"):
        refuse(document, generates=False)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"content":[{"\\u0069mage\\u005f\\u0075rl":"http:\\/\\/a"}]}]}',
        b'{"messages":[{"content":[{"\\u0075\\u0072\\u006c":"ftp"}]}]}',
        b'{"messages":[{"content":[{"image":"http:\\/\\/a"}]}]}',
        b'{"messages":[{"content":[{"image":"http:/\\/a"}]}]}',
        b'{"messages":[{"content":[{"image":"http\\u003a//a"}]}]}',
        b'{"messages":[{"content":[{"image":"http:\\u002f\\u002Fa"}]}]}',
    ],
)
def test_no_spelling_hides_it(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="allow_media_urls"):
        refuse(orjson.loads(body))


CALL = {
    "type": "tool_use",
    "id": "1",
    "name": "fetch",
    "input": {"url": "https://example.org", "image_url": "http://a"},
}
SCHEMA = {"type": "object", "properties": {"url": {"type": "string"}}, "examples": [{"url": "https://example.org"}]}


@pytest.mark.parametrize(
    "document",
    [
        asking({"type": "text", "text": "see https://example.org"}, INLINE),
        asking({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        asking({"type": "image_url", "image_url": {"url": None}, "uuid": "a"}),
        asking({"type": "image_url", "image_url": "", "uuid": "a"}),
        asking({"type": "image", "image": "QUJD"}, {"type": "file", "file": {"file_id": "a"}}),
        asking("text", None, 5),
        asking(CALL),
        asking({**CALL, "type": "server_tool_use"}),
        {"input": "a", "tool_choice": {"type": "mcp", "server_url": "https://example.org"}},
        {"input": [{"type": "file_search_call", "results": [{"attributes": {"url": "https://example.org"}}]}]},
        {"messages": [{"role": "user", "content": "https://example.org"}, "text", None]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"url": "http://a"}}}]}]},
        {"messages": [{"role": "assistant", "content": "a", "annotations": [{"url_citation": {"url": "http://a"}}]}]},
        {"input": [{"type": "web_search_call", "action": {"type": "open_page", "url": "https://example.org"}}]},
        {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
        {"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"messages": [], "metadata": {"url": "https://example.org", "callback_url": "https://example.org"}},
        {"messages": [], "documents": [{"text": "a", "url": "https://example.org"}]},
        {"messages": 5},
        {"input": ["https://example.org"]},
        {"input": "https://example.org"},
        {},
    ],
)
def test_everything_else_is_the_backends_to_judge(document: dict[str, Any]) -> None:
    refuse(document)


def test_nesting_up_to_the_limits_is_looked_into() -> None:
    inner: Any = REMOTE
    for _ in range(30):
        inner = [{"a": inner}]
    with pytest.raises(InvalidRequest):
        refuse({"x": inner})
    for _ in range(2000):  # deeper than the interpreter's stack, which the guards refuse before
        inner = [inner]
    with pytest.raises(InvalidRequest):
        refuse({"url": inner})


@pytest.mark.parametrize("place", [0, 65_535, 65_536, 199_999])
def test_a_long_list_hides_no_remote_media(place: int) -> None:
    parts: list[Any] = [INLINE] * 200_000
    refuse(asking(*parts))
    parts[place] = REMOTE
    with pytest.raises(InvalidRequest, match="allow_media_urls"):
        refuse(asking(*parts))
    urls = ["data:,a"] * 200_000
    refuse({"video": urls})
    urls[place] = "https://example.org/a.png"
    with pytest.raises(InvalidRequest, match="allow_media_urls"):
        refuse({"video": urls})
