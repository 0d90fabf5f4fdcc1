"""Token counts as vLLM reports them."""

from typing import Any


def usage(prompt_tokens: int, output_tokens: int, details: dict[str, Any] | None = None) -> dict[str, Any]:
    """The `usage` object of a complete answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


def final_chunk_usage(prompt_tokens: int, output_tokens: int, details: dict[str, Any] | None) -> dict[str, Any]:
    """The `usage` object of a stream's last chunk, which leaves out what is null."""
    return {
        key: {name: count for name, count in value.items() if count is not None} if isinstance(value, dict) else value
        for key, value in usage(prompt_tokens, output_tokens, details).items()
        if value is not None
    }
