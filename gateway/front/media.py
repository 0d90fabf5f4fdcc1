"""Media that a request names by URL. A backend would fetch it from inside its own network, whatever a client wrote."""

from typing import Any

from gateway.errors import InvalidRequest

_LARGE_BYTES = 65536
_HINTS = (b"url", b"\\u00", b":/", rb":\/", b"data_format")  # of these a body has one if it names media by URL
_CONTAINERS = frozenset((dict, list))
_MEDIA = frozenset(("image", "images", "audio", "audios", "video", "videos", "file", "files"))
_REMOTE_FORMATS = frozenset(("url", "path"))
# What clients write, and engines give to templates and grammars as it is.
_NOT_MEDIA = frozenset(
    ("tools", "functions", "metadata", "response_format", "structured_outputs", "guided_json", "output_config",
     "arguments", "annotations", "citations", "action", "chat_template_kwargs")
)  # fmt: skip


def refuse_remote_media(document: dict[str, Any], body: bytes, *, generates: bool) -> None:
    """Raises InvalidRequest for an image, sound, video or file that is not in the request itself.

    The rule: wherever it stands, a field whose name ends in `url` or `urls` (`image_url`, or `url` of an Anthropic
    `source`) holds `data:` URLs only, and a field `image`, `audio`, `video` or `file` no other URL. No object has
    `data_format: url` or `path`, by which plugins of vLLM for /pooling fetch `data`. vLLM 0.20 to 0.33 fetches
    `image_url`, `audio_url` and `video_url` of content parts, in `messages`, in items of `input` and their outputs, and
    in what is scored, and the `url` of a `source`. The rule is wider, because new versions add names like these.

    Not looked at is what no engine takes media from: tools and the arguments of their calls, output schemas, metadata,
    citations and the pages of a web search; and `documents`, where these are read by a chat template.
    """
    if len(body) < _LARGE_BYTES and not any(hint in body for hint in _HINTS):
        return
    left: list[Any] = [document]
    while left:
        value = left.pop()
        if type(value) is list:
            if not _CONTAINERS.isdisjoint(set(map(type, value))):
                left += [each for each in value if type(each) in _CONTAINERS]
            continue
        skipped = "input" if value.get("type") == "tool_use" else "text" if value is document else None
        for name, inner in value.items():
            kind = type(inner)
            names_media = name.endswith(("url", "urls")) or name in _MEDIA or name == "data_format"
            if kind is str and names_media:
                _check(name, inner)
            elif kind is list and names_media:
                for each in inner:
                    if type(each) is str:
                        _check(name, each)
            if kind is list and name == "documents" and generates:
                continue
            if kind in _CONTAINERS and name not in _NOT_MEDIA and not (kind is dict and name == skipped):
                left.append(inner)


def _check(name: str, text: str) -> None:
    if name == "data_format":
        remote = text.lower() in _REMOTE_FORMATS
    elif name in _MEDIA:
        remote = "://" in text[:64] and text[:5].lower() != "data:"
    else:
        remote = text != "" and text[:5].lower() != "data:"
    if remote:
        raise InvalidRequest(
            f"The field {name!r} must hold a data: URL. Fetching media by URL is switched off here"
            " (server.allow_media_urls).",
            param=name,
        )
