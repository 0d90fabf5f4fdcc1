"""Log probabilities: made up, but of the right shape and stable."""

from typing import Any


def chat_logprobs(texts: list[str], top: int) -> dict[str, Any]:
    """The `logprobs` of a chat answer's tokens."""
    return {"content": [_token(text, -0.5) | {"top_logprobs": _alternatives(text, top)} for text in texts]}


def completion_logprobs(texts: list[str], top: int, offset: int = 0) -> dict[str, Any]:
    """The `logprobs` of a completion's tokens; offsets count characters from the prompt's end."""
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [-0.5] * len(texts),
        "tokens": texts,
        "top_logprobs": [
            {item["token"]: item["logprob"] for item in _alternatives(text, max(top, 1))} for text in texts
        ],
    }


def _alternatives(text: str, top: int) -> list[dict[str, Any]]:
    return [_token(text if rank == 0 else f" alt{rank}", -0.5 - rank) for rank in range(top)]


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
