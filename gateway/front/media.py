"""Media that a request names by URL. A backend would fetch it from inside its own network, whatever a client wrote."""

from typing import Any

from gateway.errors import InvalidRequest


def refuse_remote_media(document: dict[str, Any]) -> None:
    """Raises InvalidRequest for an image, sound or video that is not in the request itself (a `data:` URL)."""
    turns = document.get("messages")
    if turns is None:
        turns = document.get("input")
    if type(turns) is not list:
        return
    for turn in turns:
        content = turn.get("content") if type(turn) is dict else None
        if type(content) is list:
            for part in content:
                if type(part) is dict and (name := _remote(part)):
                    raise InvalidRequest(
                        f"The {name} of a message must be a data: URL. Fetching media by URL is switched off here"
                        " (server.allow_media_urls).",
                        param=name,
                    )


def _remote(part: dict[str, Any]) -> str | None:
    """The field of a content part that points elsewhere."""
    for name, value in part.items():
        url = value.get("url") if type(value) is dict else value if name.endswith("url") else None
        if type(url) is str and url[:5].lower() != "data:":
            return name
    return None
