"""Compares the gateway's tokens with a backend's, on prompts that show where two tokenizers differ."""

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gateway.backends.backend import Backend
from gateway.backends.vllm_api import ControlClient, ControlError
from gateway.tokenization.conversation import ContentFormat, Feature

Tokens = Sequence[int]

_TEXT: Final = (
    "Příliš žluťoučký kůň, 3.14159 = 10²³;  two  spaces\t日本語 e\u0301 🧑\u200d🚀\n"
    "\n\tdef f(x):\n        return x ** 2\n"
)
_FUNCTIONS: Final = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Today's weather \u2013 <b>briefly</b>.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
_CALL: Final = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"place": "Plze\u0148", "days": 2}'},
}
_SYSTEM: Final = {"role": "system", "content": "You are brief. Ž\n"}
_QUESTION: Final = {"role": "user", "content": _TEXT}
_ANSWER: Final = {"role": "assistant", "content": " It squares:\n\n```\n4\n```"}
_THOUGHT: Final = {"role": "assistant", "content": "Four.", "reasoning": "Two squared\nis four."}
_PARTS: Final = [{"type": "text", "text": "First part."}, {"type": "text", "text": " And a second one."}]

# Texts that show whether a backend changes texts before it tokenizes them for an embedding. /tokenize does not show
# that: for some models, vLLM changes texts to lower case.
EMBEDDED: Final = (
    _TEXT,
    "STRASSE, Straße, İstanbul, ÀÉÎ: MIXED Case",
    "Neither [CLS] nor [SEP] nor <s> nor </s> nor <|endoftext|>",
    "a",
)


class Probe(NamedTuple):
    """A request, as clients send it and /tokenize accepts it, and the feature that it tests."""

    feature: Feature
    document: Mapping[str, Any]

    @property
    def endpoint(self) -> str:
        return "completions" if self.feature is Feature.COMPLETION else "chat"


def _chat(*messages: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "add_generation_prompt": True, **more}


PROBES: Final = (
    Probe(Feature.COMPLETION, {"prompt": _TEXT}),
    Probe(Feature.COMPLETION, {"prompt": _TEXT * 2, "add_special_tokens": False}),
    Probe(Feature.CHAT, _chat(_QUESTION)),
    Probe(Feature.CHAT, _chat(_QUESTION, _ANSWER, {"role": "user", "content": "\tThanks. "})),
    Probe(Feature.CHAT, _chat(_SYSTEM, _QUESTION)),
    Probe(Feature.PARTS, _chat({"role": "user", "content": _PARTS})),
    Probe(Feature.TOOLS, _chat(_QUESTION, tools=_FUNCTIONS)),
    Probe(
        Feature.TOOLS,
        _chat(
            _QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "blue"}'},
            tools=_FUNCTIONS,
        ),
    ),
    Probe(Feature.REASONING, _chat(_QUESTION, _THOUGHT, {"role": "user", "content": "And cubed?"})),
    Probe(
        Feature.CONTINUED, _chat(_QUESTION, _ANSWER) | {"add_generation_prompt": False, "continue_final_message": True}
    ),
)
_HINTS: Final = {
    Feature.COMPLETION: "the backend uses a different tokenizer, tokenizer revision or tokenizer mode",
    Feature.CHAT: "the backend uses a different chat template, or one of the flags --chat-template,"
    " --chat-template-content-format, --default-chat-template-kwargs",
}


class Comparison(NamedTuple):
    """The features that both sides render alike; a `difference` makes all of them unusable."""

    features: frozenset[Feature]
    difference: str = ""

    @property
    def alike(self) -> bool:
        """Whether the gateway's tokens can be used for the backend."""
        return bool(self.features) and not self.difference


def compare(ours: Sequence[Tokens | None], theirs: Sequence[Tokens | None]) -> Comparison:
    """Both sides' answers to `PROBES`, in their order; None = that side refuses the prompt.

    A probe that both refuse says nothing (templates may refuse system turns, and some models have no template).
    """
    rendered: set[Feature] = set()
    unlike: dict[Feature, str] = {}
    for probe, our, their in zip(PROBES, ours, theirs, strict=True):
        if our is None and their is None:
            continue
        rendered.add(probe.feature)
        if (difference := _difference(our, their)) and probe.feature not in unlike:
            unlike[probe.feature] = difference
    for feature in (Feature.COMPLETION, Feature.CHAT):
        if feature in unlike:
            return Comparison(frozenset(), f"{feature}: {unlike[feature]}; possible cause: {_HINTS[feature]}")
    return Comparison(frozenset(rendered - unlike.keys()))


def _difference(ours: Tokens | None, theirs: Tokens | None) -> str:
    if ours is None or theirs is None:
        return "only the backend renders it" if ours is None else "only the gateway renders it"
    if ours == theirs:
        return ""
    for position, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return f"different from token {position} on: gateway {our}, backend {their}"
    return f"different length: gateway {len(ours)} tokens, backend {len(theirs)}"


PATH = "/tokenize"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
_NOT_THERE = (404, 405, 501)
_REFUSED = (400, 422)  # the backend cannot render this prompt
_PASSING = (None, 429, 503)  # ask again

Tokenize = Callable[[Probe, ContentFormat], Awaitable[bytes | None]]


class CannotCompare(Exception):
    """The backend does not expose its tokens; the message gives the reason."""


async def compared(
    model: str, backend: Backend, client: ControlClient, tokenize: Tokenize
) -> dict[ContentFormat, Comparison]:
    """The comparison for each content format. Raises CannotCompare, or ControlError if a retry may succeed."""
    theirs = [await _theirs(model, backend, client, probe) for probe in PROBES]
    comparisons = {}
    for content_format in ContentFormat:
        ours = [_ids(await tokenize(probe, content_format)) for probe in PROBES]
        comparisons[content_format] = compare(ours, theirs)
    return comparisons


def best_format(comparisons: dict[ContentFormat, Comparison]) -> ContentFormat:
    """The content format with the most features that are alike."""
    return max(comparisons, key=lambda each: (comparisons[each].alike, len(comparisons[each].features)))


async def counts_alike(model: str, backend: Backend, client: ControlClient, ours: list[int]) -> tuple[bool, str]:
    """Whether the backend counts the texts of `EMBEDDED` like this when it embeds them; if it embeds, what differs.

    Raises ControlError if it is worth another try.
    """
    for text, count in zip(EMBEDDED, ours, strict=True):
        try:
            answer = await client.post(backend, EMBEDDINGS_PATH, {"model": model, "input": text})
            theirs = answer["usage"]["prompt_tokens"]
        except ControlError as error:
            if error.status in _PASSING:
                raise
            return False, ""
        except (KeyError, TypeError):
            return False, f"{EMBEDDINGS_PATH} returned no usage"
        if theirs != count:
            return False, f"{EMBEDDINGS_PATH} counts {theirs} tokens where the gateway counts {count}"
    return True, ""


async def _theirs(model: str, backend: Backend, client: ControlClient, probe: Probe) -> list[int] | None:
    try:
        answer = await client.post(backend, PATH, {"model": model, **probe.document})
    except ControlError as error:
        if error.status in _REFUSED:
            return None
        if error.status in _NOT_THERE:
            raise CannotCompare(str(error)) from error
        raise
    return _checked(answer)


def _checked(answer: Any) -> list[int]:
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise CannotCompare(f"{PATH} returned no list of tokens")
    return tokens


def _ids(tokens: bytes | None) -> list[int] | None:
    return None if tokens is None else array("I", tokens).tolist()
