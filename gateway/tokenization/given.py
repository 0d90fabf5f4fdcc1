"""Prompts that a client gave as token ids: known exactly, whatever the model, without any tokenizer."""

from typing import Any

from gateway.routing.token_blocks import packed

_CHANGES_THE_PROMPT = ("truncate_prompt_tokens", "prompt_embeds", "suffix")


def given_tokens(document: dict[str, Any], endpoint: str) -> bytes | None:
    """The packed ids of a completion's one prompt, if it was given as ids."""
    if endpoint != "completions" or any(document.get(name) is not None for name in _CHANGES_THE_PROMPT):
        return None
    prompt = document.get("prompt")
    if type(prompt) is list and len(prompt) == 1 and type(prompt[0]) is list:
        prompt = prompt[0]
    if type(prompt) is not list or not prompt or set(map(type, prompt)) != {int}:
        return None
    try:
        return packed(prompt)
    except OverflowError:
        return None
