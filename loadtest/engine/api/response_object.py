"""The `response` object of the Responses API."""

from typing import Any

from loadtest.engine.choice import Choice


def response_object(
    body: dict[str, Any],
    response_id: str,
    message_id: str,
    model: str,
    created: int,
    choice: Choice,
    finished_tokens: int | None,
) -> dict[str, Any]:
    """The object with its output and usage; `finished_tokens` is None while it is in progress."""
    finished = finished_tokens is not None
    cut = finished and choice.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    return {
        "id": response_id,
        "created_at": created,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": model,
        "object": "response",
        "output": [message_item(message_id, choice.text(0, finished_tokens))] if finished_tokens is not None else [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": 1.0 if body.get("temperature") is None else float(body["temperature"]),
        "tool_choice": body.get("tool_choice", "none" if not body.get("tools") else "auto"),
        "tools": body.get("tools") or [],
        "top_p": float(body.get("top_p") or 1.0),
        "background": False,
        "max_output_tokens": body.get("max_output_tokens") or choice.sequence.output_tokens,
        "max_tool_calls": None,
        "previous_response_id": body.get("previous_response_id"),
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": status if finished else "in_progress",
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": _usage(choice) if finished else None,
        "user": body.get("user"),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def message_item(message_id: str, text: str | None) -> dict[str, Any]:
    """The output message, still empty if the text is None."""
    content = [] if text is None else [text_part(text)]
    status = "in_progress" if text is None else "completed"
    return {
        "id": message_id,
        "content": content,
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def text_part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    """The text of an output message."""
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _usage(choice: Choice) -> dict[str, Any]:
    sequence = choice.sequence
    return {
        "input_tokens": sequence.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": sequence.cached_tokens,
            "cache_write_tokens": sequence.created_cache_tokens,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": sequence.output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": sequence.prompt_tokens + sequence.output_tokens,
    }
