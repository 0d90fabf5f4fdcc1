"""Workloads: their description, prompts by index, and request bodies.

The same seed and index give the same prompt in any process, so workers can share a workload.
"""

from __future__ import annotations

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import orjson
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from loadtest.workloads.tokens import ExactProse, load_tokenizer


class WorkloadKind(StrEnum):
    """The shapes of prompt there are."""

    SHARED_PREFIX = "shared-prefix"
    PREFIX_REPETITION = "prefix-repetition"
    UNIQUE = "unique"
    SESSIONS = "sessions"
    SHAREGPT = "sharegpt"
    TEXTS = "texts"
    AUDIO = "audio"
    TRACE = "trace"
    BODIES = "bodies"


WITH_PREFIX = (WorkloadKind.SHARED_PREFIX, WorkloadKind.PREFIX_REPETITION, WorkloadKind.SESSIONS)


_LATER = ("most_tail_tokens", "tokenizer", "audio_seconds")


class SourceFile(BaseModel):
    """A source file of prompts, and its contents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Of a folder, the hash is that of the names and sizes in it."""
        if path.is_dir():
            listed = "".join(f"{one.name} {one.stat().st_size}\n" for one in sorted(path.iterdir()))
            return cls(path=str(path.resolve()), sha256=hashlib.sha256(listed.encode()).hexdigest())
        with path.open("rb") as file:
            return cls(path=str(path.resolve()), sha256=hashlib.file_digest(file, "sha256").hexdigest())


class WorkloadSpec(BaseModel):
    """Sizes are requested in tokens and approximated by bytes; the report shows the server's counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: WorkloadKind = WorkloadKind.SHARED_PREFIX
    groups: int = Field(default=8, ge=1, description="Distinct shared prefixes.")
    prefix_tokens: int = Field(default=1024, ge=1, description="Tokens every request of a group shares.")
    tail_tokens: int = Field(default=64, ge=1, description="Tokens only this request has; the fewest, where they vary.")
    most_tail_tokens: int | None = Field(default=None, description="The most of them: even in the logarithm up to it.")
    tokenizer: str | None = Field(default=None, description="Cuts texts to exact numbers of tokens: a path or a name.")
    bytes_per_token: float = Field(default=4.5, gt=0, description="How many bytes of prose make a token.")
    max_tokens: int = Field(default=128, ge=1, description="Output length.")
    output_spread: float = Field(default=0.0, ge=0, lt=1, description="Output lengths vary by this share, evenly.")
    seed: int = 0
    turns: tuple[int, int] = Field(default=(2, 6), description="Fewest and most turns of a session.")
    think_seconds: float = Field(default=0.0, ge=0, description="Mean pause between an answer and the next turn.")
    inputs: tuple[int, int] = Field(default=(1, 1), description="Fewest and most texts of a request (texts).")
    audio_seconds: tuple[int, int] | None = Field(default=None, description="Shortest and longest audio (audio).")
    file: SourceFile | None = Field(default=None, description="The trace, or the dataset.")
    block_tokens: int | None = Field(default=None, ge=1, description="Tokens of a hash_ids block, if not the format's.")

    @property
    def prompt_tokens(self) -> int:
        """Requested tokens of each prompt, if all are alike; 0 if a file has the prompts."""
        if self.kind in (WorkloadKind.BODIES, WorkloadKind.AUDIO):
            return 0
        if self.kind is WorkloadKind.SESSIONS and self.file is not None:
            return 0
        return round(self._mean_tail_tokens) + (self.prefix_tokens if self.kind in WITH_PREFIX else 0)

    @property
    def _mean_tail_tokens(self) -> float:
        low, high = self.tail_tokens, self.most_tail_tokens or self.tail_tokens
        return low if low == high else (high + 1 - low) / math.log((high + 1) / low) - 0.5

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What an earlier version did not know is left out where it is off: hashes of plans stay what they were."""
        found: dict[str, Any] = serialize(self)
        return {name: value for name, value in found.items() if value is not None or name not in _LATER}


_PROSE = (
    "the of and to in is that it was for on are as with they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before also around another came come work three word must because does part even place well "
    "such here take why things help put years different away again off went old number great tell men say small "
    "every found still between name should home big give air line set own under read last never us left end along "
    "while might next sound below saw something thought both few those always looked show large often together asked "
    "house world going want school important until form food keep children feet land side without boy once animals "
    "life enough took sometimes four head above kind began almost live page got earth need far hand high year mother "
    "light parts country father let night following picture being study second eyes soon times story boys since "
    "white days ever paper hard near sentence better best across during today others however sure means knew try told"
)

_CORPUS_BYTES = 1 << 18


class Corpus:
    """A fixed stretch of prose; a slice costs one copy, so a long prompt costs no per-word work while driving."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"corpus-{seed}")
        words = rng.choices(_PROSE.split(), k=_CORPUS_BYTES // 5)
        self.text = " ".join(words)

    def slice(self, rng: random.Random, length_bytes: int) -> str:
        """`length_bytes` of prose from a random place; wraps round, so any length can be had."""
        start = rng.randrange(len(self.text))
        piece = self.text[start : start + length_bytes]
        while len(piece) < length_bytes:
            piece += self.text[: length_bytes - len(piece)]
        return piece


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A whole number, even in its logarithm: small ones are as likely as large ones."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


NO_GROUP = -1


class Endpoint(StrEnum):
    """The endpoints that can be driven."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"
    TRANSCRIPTIONS = "transcriptions"
    TRANSLATIONS = "translations"

    @property
    def path(self) -> str:
        """Its path below the base URL."""
        if self.takes_audio:
            return f"/v1/audio/{self}"
        return "/v1/" + {"chat": "chat/completions"}.get(self, self.value)

    @property
    def generates(self) -> bool:
        """Whether it continues a prompt, up to a requested length."""
        return self in (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES)

    @property
    def takes_audio(self) -> bool:
        """Whether a file is uploaded, and answered with its text."""
        return self in (Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS)

    @property
    def streams(self) -> bool:
        """Whether it can answer token by token; else with numbers, in one piece."""
        return self.generates or self.takes_audio

    @property
    def content_type(self) -> str:
        return f"multipart/form-data; boundary={_BOUNDARY}" if self.takes_audio else "application/json"


_BOUNDARY = "f7c2a1d04b3e4c58-loadtest"


@dataclass(frozen=True, slots=True)
class Audio:
    """A file to upload with other fields of its form. `seconds` is None where its length is not known."""

    name: str
    data: bytes
    seconds: float | None
    _: KW_ONLY
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A body that is sent as it is. `answers_at`: for each turn before, the message that its answer replaces."""

    endpoint: Endpoint
    fields: Mapping[str, Any]
    answers_at: tuple[int | None, ...] = ()

    def after(self, answers: Sequence[str]) -> Recorded:
        """With the server's answers to earlier turns, in place of the recorded ones."""
        said = {place: text for place, text in zip(self.answers_at, answers, strict=False) if text}
        if said.keys() <= {None}:
            return self
        messages = [
            {**message, "content": said[place]} if place in said else message
            for place, message in enumerate(self.fields["messages"])
        ]
        return replace(self, fields={**self.fields, "messages": messages})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its group's shared part (may be empty), then its own, and the length of its answer.

    `asked_tokens` is its length as planned; `history` has the turns of user and assistant between prefix and tail;
    `inputs` are the texts of an embeddings request with several; `audio` stands for all text.
    """

    group: int
    _: KW_ONLY
    prefix: str
    tail: str
    max_tokens: int
    asked_tokens: int = 0
    history: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    recorded: Recorded | None = None
    audio: Audio | None = None

    def after(self, history: tuple[str, ...]) -> Prompt:
        """The same as the next turn of a conversation."""
        if self.recorded is not None:
            return replace(self, recorded=self.recorded.after(history[1::2]))
        return replace(self, history=history) if history else self


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, sent so long after the answer before it, with what was said or without."""

    prompt: Prompt
    pause_seconds: float = 0.0
    remembers: bool = False


class Source(ABC):
    """Every conversation of a workload, many of one turn, and prompts to warm up with that share no prefix with any.

    `count` is their number (None: no end); `arrivals_seconds` are the recorded arrivals, if any.
    """

    def __init__(self, spec: WorkloadSpec) -> None:
        self.spec = spec
        self.corpus = Corpus(spec.seed)
        self.tokenizer = load_tokenizer(spec.tokenizer) if spec.tokenizer is not None else None
        self._exact = None if self.tokenizer is None else ExactProse(self.tokenizer, self.corpus.text)
        self.count: int | None = None
        self.arrivals_seconds: Sequence[float] = ()

    @abstractmethod
    def turns(self, index: int) -> Iterable[Turn]:
        """The conversation of that index; long ones are made turn by turn, as they are sent."""

    def warmup(self, index: int) -> Prompt:
        """A prompt of the same size that shares its first block with no measured prompt and no other warm-up."""
        text = self.distinct(f"warm-up {index}", self.spec.prompt_tokens or self.spec.tail_tokens)
        return Prompt(NO_GROUP, prefix="", tail=text, max_tokens=self.spec.max_tokens)

    def output_length(self, rng: random.Random) -> int:
        """Even around the asked length: equal lengths would keep the users of a closed loop in step for ever."""
        spread = self.spec.output_spread
        return max(1, round(self.spec.max_tokens * rng.uniform(1 - spread, 1 + spread)))

    def tail_length(self, rng: random.Random) -> int:
        """Tokens that a request has alone."""
        low, high = self.spec.tail_tokens, self.spec.most_tail_tokens
        return low if high is None else log_uniform(rng, low, high)

    def distinct(self, label: str, tokens: int) -> str:
        """Prose that is unlike any other label's from its first bytes on: prefix caches match from the start."""
        rng = random.Random(f"{self.spec.seed}-{label}")
        return self._headed(f"{rng.getrandbits(48):012x} {label}: ", rng, tokens)

    def _headed(self, head: str, rng: random.Random, tokens: int) -> str:
        if self.tokenizer is not None and self._exact is not None:
            if (made := self._exact.text(head.rstrip(), rng, tokens)) is not None:
                return made
            state = rng.getstate()

            def text_of(length_bytes: int) -> str:
                rng.setstate(state)
                return head + self.corpus.slice(rng, length_bytes)

            return self.tokenizer.cut(text_of, self.spec.bytes_per_token, tokens)
        length_bytes = max(len(head), round(tokens * self.spec.bytes_per_token))
        return head + self.corpus.slice(rng, length_bytes - len(head))


@dataclass(slots=True)
class _Rounds:
    """Which group each index has: every round of as many indices as there are groups has each group once."""

    seed: int
    groups: int
    _round: int = field(default=-1, init=False)
    _order: list[int] = field(default_factory=list, init=False)

    def group(self, index: int) -> int:
        number, place = divmod(index, self.groups)
        if number != self._round:
            self._order = random.Random(f"{self.seed}-round-{number}").sample(range(self.groups), self.groups)
            self._round = number
        return self._order[place]


class PromptSource(Source):
    """Single requests: with a prefix that a group shares, or with nothing shared."""

    def __init__(self, spec: WorkloadSpec) -> None:
        super().__init__(spec)
        groups = 0 if spec.kind is WorkloadKind.UNIQUE else spec.groups
        self._prefixes = [self.distinct(f"topic {group}", spec.prefix_tokens) for group in range(groups)]
        self._rounds = _Rounds(spec.seed, groups) if spec.kind is WorkloadKind.PREFIX_REPETITION else None

    def turns(self, index: int) -> Sequence[Turn]:
        return (Turn(self.prompt(index)),)

    def prompt(self, index: int) -> Prompt:
        """The prompt of request `index`; its group is drawn uniformly, or each is taken once a round."""
        rng = random.Random(f"{self.spec.seed}-request-{index}")
        max_tokens, tail_tokens = self.output_length(rng), self.tail_length(rng)
        tail = self.distinct(f"request {index}", tail_tokens)
        asked = tail_tokens + (self.spec.prefix_tokens if self._prefixes else 0)
        if not self._prefixes:
            return Prompt(NO_GROUP, prefix="", tail=tail, max_tokens=max_tokens, asked_tokens=asked)
        group = rng.randrange(len(self._prefixes)) if self._rounds is None else self._rounds.group(index)
        return Prompt(group, prefix=self._prefixes[group], tail=tail, max_tokens=max_tokens, asked_tokens=asked)


@dataclass(frozen=True, slots=True)
class Call:
    """Which endpoint a body is for, how its answer comes, and whether its text is needed."""

    endpoint: Endpoint
    stream: bool
    keeps_text: bool = False


def _form_value(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else orjson.dumps(value)


QUERY = "Which of these texts speaks of light and water?"


def fingerprint(body: bytes) -> str:
    """A short hash that identifies a sent body."""
    return hashlib.sha256(body).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class BodyMaker:
    """Turns prompts into bodies; the constant part of requests is set once."""

    endpoint: Endpoint
    model: str
    _: KW_ONLY
    stream: bool
    ignore_eos: bool = True
    cache_salt: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def call(self, prompt: Prompt, *, keeps_text: bool = False) -> Call:
        """To which endpoint its body goes, and whether as a stream."""
        if prompt.recorded is None:
            return Call(self.endpoint, self.stream and self.endpoint.streams, keeps_text)
        endpoint = prompt.recorded.endpoint
        return Call(endpoint, endpoint.generates and bool(self._recorded_fields(prompt.recorded)["stream"]), keeps_text)

    def body(self, prompt: Prompt) -> bytes:
        if prompt.recorded is not None:
            return orjson.dumps(self._recorded_fields(prompt.recorded))
        if prompt.audio is not None:
            return self._form(prompt.audio)
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint.generates:
            fields |= self._prompt_fields(prompt) | self._generation_fields(prompt.max_tokens)
        else:
            fields |= self._input_fields(prompt)
        if self.cache_salt:
            fields["cache_salt"] = self.cache_salt
        return orjson.dumps(fields | dict(self.extra))

    def _form(self, audio: Audio) -> bytes:
        """Uploads differ by their audio: there is no prefix cache to salt."""
        fields: dict[str, Any] = {"model": self.model, "response_format": "json"}
        if self.stream:
            fields |= {"stream": True, "stream_include_usage": True}
        fields |= {**audio.fields, **self.extra}
        parts = [(f'name="{name}"', _form_value(value)) for name, value in fields.items()]
        parts.append((f'name="file"; filename="{quote(audio.name)}"', audio.data))
        edge = f"--{_BOUNDARY}\r\ncontent-disposition: form-data; "
        made = [f"{edge}{head}\r\n\r\n".encode() + value + b"\r\n" for head, value in parts]
        return b"".join(made) + f"--{_BOUNDARY}--\r\n".encode()

    def _recorded_fields(self, recorded: Recorded) -> dict[str, Any]:
        """As recorded, except for the salt and the user's additions; a stream reports its usage."""
        fields = {"model": self.model, **recorded.fields}
        if self.cache_salt:
            own = fields.get("cache_salt")
            fields["cache_salt"] = f"{own} {self.cache_salt}" if own else self.cache_salt
        fields |= self.extra
        if not recorded.endpoint.generates:
            fields.pop("stream", None)
            return fields
        if not fields.setdefault("stream", False):
            fields.pop("stream_options", None)
        elif recorded.endpoint is not Endpoint.RESPONSES:
            fields["stream_options"] = {**(fields.get("stream_options") or {}), "include_usage": True}
        return fields

    def _input_fields(self, prompt: Prompt) -> dict[str, Any]:
        text = prompt.prefix + prompt.tail
        if self.endpoint is Endpoint.EMBEDDINGS:
            return {"input": list(prompt.inputs) if len(prompt.inputs) > 1 else text}
        texts = list(prompt.inputs) or [text]
        if self.endpoint is Endpoint.RERANK:
            return {"query": QUERY, "documents": texts}
        return {"text_1": QUERY, "text_2": texts}

    def _prompt_fields(self, prompt: Prompt) -> dict[str, Any]:
        if self.endpoint is Endpoint.COMPLETIONS:
            return {"prompt": "".join((prompt.prefix, *prompt.history, prompt.tail))}
        said = zip(cycle(("user", "assistant")), (*prompt.history, prompt.tail), strict=False)
        messages = [{"role": role, "content": text} for role, text in said]
        if prompt.prefix:
            messages.insert(0, {"role": "system", "content": prompt.prefix})
        return {"input" if self.endpoint is Endpoint.RESPONSES else "messages": messages}

    def _generation_fields(self, max_tokens: int) -> dict[str, Any]:
        is_response = self.endpoint is Endpoint.RESPONSES
        fields: dict[str, Any] = {"max_output_tokens" if is_response else "max_tokens": max_tokens, "temperature": 0}
        if self.ignore_eos:
            fields |= {"ignore_eos": True, "min_tokens": max_tokens}
        if self.stream:
            fields |= {"stream": True} | ({} if is_response else {"stream_options": {"include_usage": True}})
        return fields
