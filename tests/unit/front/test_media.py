from typing import Any

import pytest

from gateway.errors import InvalidRequest
from gateway.front.media import refuse_remote_media

INLINE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def asking(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "look"}, {"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        {"type": "image_url", "image_url": {"url": "HTTPS://example.org/a.png"}},
        {"type": "image_url", "image_url": "http:\\\\127.0.0.1\\x"},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "audio_url", "audio_url": {"url": " data:,x"}},
        {"type": "input_image", "image_url": "https://example.org/a.png"},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
    ],
)
def test_media_that_is_not_in_the_request_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="allow_media_urls"):
        refuse_remote_media(asking({"type": "text", "text": "see"}, INLINE, part))
    with pytest.raises(InvalidRequest):
        refuse_remote_media({"input": [{"role": "user", "content": [part]}]})


@pytest.mark.parametrize(
    "document",
    [
        asking({"type": "text", "text": "see https://example.org"}, INLINE),
        asking({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        asking("text", None, 5),
        {"messages": [{"role": "user", "content": "https://example.org"}, "text", None]},
        {"messages": 5},
        {"input": ["https://example.org"]},
        {"input": "https://example.org"},
        {},
    ],
)
def test_everything_else_is_the_backends_to_judge(document: dict[str, Any]) -> None:
    refuse_remote_media(document)
