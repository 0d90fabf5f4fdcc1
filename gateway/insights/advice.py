"""What to do about a cause, in one sentence."""

from gateway.insights.kinds import Kind

_ADVICE = {
    Kind.TIMESTAMP: "Move the time behind the shared text (into the last user message), or round it to the day",
    Kind.UUID: "Take the id out of the prompt, or move it behind the shared text",
    Kind.ID: "Take the id out of the prompt, or move it behind the shared text",
    Kind.EMAIL: "Move what is said of the user behind the shared text",
    Kind.NAME: "Move what looks like a name behind the shared text, as into the first user message",
    Kind.NUMBER: "Move the number behind the shared text",
    Kind.WORDS: "Put the shared text first, and what is different in each request behind it",
    Kind.EXTRA_TEXT: "Some prompts have text here that others lack: keep it in all, or move it behind the shared text;"
    " if it is old turns that are cut off, cut many at a time and seldom",
    Kind.TOOL_ORDER: "Send the tools in a fixed order, sorted by name for instance",
    Kind.JSON_KEY_ORDER: "Write JSON with its keys in a fixed order (sort_keys=True)",
    Kind.TEXT_ORDER: "Keep the documents, examples or lines in a fixed order, and put what is always there first",
    Kind.CACHE_SALT: "Give requests that may share a cache the same cache_salt: it is different in prompts that are"
    " the same",
}


def advice_on(kind: Kind, place: str, saved_tokens: int) -> str:
    """What to change, where, and what it brings."""
    return f"{_ADVICE[kind]}; it is in {place}. This saves about {saved_tokens:,} tokens of prefill a request."
