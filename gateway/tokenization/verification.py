"""Compares the gateway's tokens with a backend's, on prompts that show where two tokenizers differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from gateway.tokenization.conversation import ContentFormat, Feature

_TEXT: Final = (
    "Příliš žluťoučký kůň, 3.14159 = 10²³;  two  spaces\t日本語 e\u0301 🧑\u200d🚀\n"
    "\n\tdef f(x):\n        return x ** 2\n"
)
_PARAMETERS: Final = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}},
    "required": ["place"],
}
_WEATHER: Final = {
    "name": "get_weather",
    "description": "Today's weather \u2013 <b>briefly</b>.",
    "parameters": _PARAMETERS,
}
_TOOLS: Final = [{"type": "function", "function": function} for function in (_WEATHER, {"name": "get_time"})]
_CALLED: Final = {"name": "get_weather", "arguments": '{"place": "Plze\u0148", "days": 2}'}
_CALLING: Final = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call00001", "type": "function", "function": _CALLED}],
}
_RESULT: Final = {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "blue"}'}
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
    return {"messages": list(messages), "add_generation_prompt": True} | more


PROBES: Final = (
    Probe(Feature.COMPLETION, {"prompt": _TEXT}),
    Probe(Feature.COMPLETION, {"prompt": _TEXT * 2, "add_special_tokens": False}),
    Probe(Feature.CHAT, _chat(_QUESTION)),
    Probe(Feature.CHAT, _chat(_QUESTION, _ANSWER, {"role": "user", "content": "\tThanks. "})),
    Probe(Feature.CHAT, _chat(_SYSTEM, _QUESTION)),
    Probe(Feature.PARTS, _chat({"role": "user", "content": _PARTS})),
    Probe(Feature.TOOLS, _chat(_QUESTION, tools=_TOOLS)),
    Probe(Feature.TOOLS, _chat(_QUESTION, _CALLING, _RESULT, tools=_TOOLS)),
    Probe(Feature.REASONING, _chat(_QUESTION, _THOUGHT, {"role": "user", "content": "And cubed?"})),
    Probe(Feature.CONTINUED, _chat(_QUESTION, _ANSWER, add_generation_prompt=False, continue_final_message=True)),
)
_HINTS: Final = {
    Feature.COMPLETION: "the backend uses a different tokenizer, tokenizer revision or tokenizer mode",
    Feature.CHAT: "the backend uses a different chat template, or one of the flags --chat-template,"
    " --chat-template-content-format, --default-chat-template-kwargs",
}


class TokenizerVerdict(NamedTuple):
    """Whether a backend's tokens of a model are those of the gateway; `counts`: also those of embedded texts."""

    state: Literal["pending", "verified", "refused"] = "pending"
    reason: str = ""
    features: frozenset[Feature] = frozenset()  # that both sides render alike
    counts: bool = False

    def as_dict(self) -> dict[str, Any]:
        features = sorted(feature.value for feature in self.features)
        return {"state": self.state, "reason": self.reason, "features": features, "embeddings": self.counts}


def compare(ours: Sequence[list[int] | None], theirs: Sequence[list[int] | None]) -> TokenizerVerdict:
    """Both sides' answers to `PROBES`, in their order; None = that side refuses the prompt.

    A probe that both refuse says nothing (templates may refuse system turns, and some models have no template).
    """
    rendered: set[Feature] = set()
    unlike: dict[Feature, str] = {}
    for probe, our, their in zip(PROBES, ours, theirs, strict=True):
        if our is None and their is None:
            continue
        rendered.add(probe.feature)
        if difference := _difference(our, their):
            unlike.setdefault(probe.feature, difference)
    for feature, hint in _HINTS.items():
        if feature in unlike:
            return TokenizerVerdict("refused", f"{feature}: {unlike[feature]}; possible cause: {hint}")
    if not (alike := frozenset(rendered - unlike.keys())):
        return TokenizerVerdict("refused", "neither the gateway nor the backend renders any prompt")
    return TokenizerVerdict("verified", features=alike)


def _difference(ours: list[int] | None, theirs: list[int] | None) -> str:
    if ours is None or theirs is None:
        return "only the backend renders it" if ours is None else "only the gateway renders it"
    if ours == theirs:
        return ""
    for position, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return f"different from token {position} on: gateway {our}, backend {their}"
    return f"different length: gateway {len(ours)} tokens, backend {len(theirs)}"


@dataclass
class ModelState:
    """One model's tokenizer, and the backends that it was compared with."""

    name: str
    source: str
    encoding: str = ""  # how its texts are encoded; empty = not loaded
    failure: str = ""
    content_format: ContentFormat = ContentFormat.STRING
    verdicts: dict[str, TokenizerVerdict] = field(default_factory=dict)
    features: frozenset[Feature] = frozenset()  # verified on every verified backend

    def verdict(self, backend: str) -> TokenizerVerdict:
        return self.verdicts.get(backend, TokenizerVerdict())

    def loaded(self, encoding: str, failure: str = "") -> None:
        self.encoding, self.failure = encoding, failure

    def begin_comparison(self, backend: str) -> TokenizerVerdict:
        """A new pending verdict. While it is this very object, the backend and the tokenizer have not restarted."""
        verdict = self.verdicts[backend] = TokenizerVerdict(reason=self.verdict(backend).reason)
        return verdict

    def judged(self, backend: str, verdict: TokenizerVerdict, content_format: ContentFormat | None = None) -> None:
        self.content_format = content_format or self.content_format
        self.verdicts[backend] = verdict
        verified = [each.features for each in self.verdicts.values() if each.state == "verified"]
        self.features = frozenset.intersection(*verified) if verified else frozenset()

    def unload(self) -> None:
        """The tokenizer's process has ended: the next one must be verified again."""
        self.encoding, self.verdicts, self.features = "", {}, frozenset()
