"""Media that a request names by URL. A backend would fetch it from inside its own network, whatever a client wrote."""

from typing import Any

from gateway.errors import InvalidRequest

_MEDIA = frozenset(("image", "images", "audio", "audios", "video", "videos", "file", "files"))
_NAMED = _MEDIA | {"data_format"}
_REMOTE_FORMATS = frozenset(("url", "path"))
_CALLS = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
# What clients write, and engines give to templates and grammars as it is.
_NOT_MEDIA = frozenset(
    ("tools", "functions", "metadata", "response_format", "structured_outputs", "guided_json", "output_config",
     "tool_choice", "attributes", "arguments", "annotations", "citations", "action", "chat_template_kwargs")
)  # fmt: skip


def refuse_remote_media(document: dict[str, Any], *, generates: bool) -> None:
    """Raises InvalidRequest for an image, sound, video or file that is not in the request itself.

    The rule: wherever it stands, a field whose name ends in `url` or `urls` (`image_url`, or `url` of an Anthropic
    `source`) holds `data:` URLs only, and a field `image`, `audio`, `video` or `file` no other URL. No object has
    `data_format: url` or `path`, by which plugins of vLLM for /pooling fetch `data`. vLLM 0.20 to 0.33 fetches
    `image_url`, `audio_url` and `video_url` of content parts, in `messages`, in items of `input` and their outputs, and
    in what is scored, and the `url` of a `source`. The rule is wider, because new versions add names like these.

    Not looked at is what no engine takes media from: tools and the arguments of their calls, output schemas, metadata,
    citations and the pages of a web search; and `documents`, where these are read by a chat template.
    """
    left: list[Any] = [document]
    while left:
        value = left.pop()
        if type(value) is list:
            left += [each for each in value if (type(each) is dict and not _is_plain(each)) or type(each) is list]
            continue
        for name, inner in value.items():
            kind = type(inner)
            if kind is str:
                if name[-3:] == "url" or name in _NAMED:
                    _check(name, inner)
            elif kind is dict:
                if name not in _NOT_MEDIA and not _is_given_as_it_is(name, value, document):
                    left.append(inner)
            elif kind is list and name not in _NOT_MEDIA and not (name == "documents" and generates):
                left.append(inner)
                if name[-3:] in ("url", "rls") or name in _NAMED:
                    for each in inner:
                        if type(each) is str:
                            _check(name, each)


def _is_plain(turn: dict[str, Any]) -> bool:
    """Whether it is a message of text, as most are: role and content, and nothing else."""
    return len(turn) == 2 and type(turn.get("content")) is str and "role" in turn


def _is_given_as_it_is(name: str, parent: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether an object is the arguments of a tool's call, or the format of the answer to a responses request."""
    return (name == "input" and parent.get("type") in _CALLS) or (name == "text" and parent is document)


def _check(name: str, text: str) -> None:
    if name == "data_format":
        remote = text.lower() in _REMOTE_FORMATS
    elif name in _MEDIA:
        remote = "://" in text[:64] and text[:5].lower() != "data:"
    else:
        remote = text != "" and text[:5].lower() != "data:"
    if remote:
        raise InvalidRequest(
            f"The field {name!r} must contain a data: URL. Fetching media by URL is disabled"
            " (server.allow_media_urls).",
            param=name,
        )
