"""Made traffic: prompts with a known cause of lost hits, or with none."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID

from gateway._native import prefix_keys
from gateway.core.observe.record import Record
from gateway.core.request import Demand, Usage
from gateway.core.routing.prompt_blocks import canonical_prompt, seed
from gateway.features.insights.report import make_report
from gateway.features.insights.samples import PrefixReport

Document = dict[str, Any]
BYTES_PER_TOKEN = 4


class Prose:
    """Sentences of words that occur nowhere else."""

    def __init__(self, random: Random) -> None:
        self._random = random
        letters = "abcdefghijklmnoprstuvw"
        self._words = ["".join(random.choices(letters, k=random.randint(2, 10))) for _ in range(4000)]

    def sentence(self) -> str:
        """One, with its full stop."""
        words = self._random.choices(self._words, k=self._random.randint(5, 14))
        if len(words) > 9:
            words[4] += ","
        return " ".join(words).capitalize() + "."

    def text(self, size: int) -> str:
        """About as many bytes, in lines of some sentences."""
        parts: list[str] = []
        length = 0
        while length < size:
            parts.append(self.sentence() + self._random.choice((" ", " ", "\n")))
            length += len(parts[-1])
        return "".join(parts)[:size]


def chat(system: str, *turns: str, **fields: Any) -> Document:
    """A chat request: the user speaks first, and last."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
    return {"messages": messages, **fields}


def times(random: Random) -> Iterator[str]:
    """Moments, each some seconds after the last."""
    now = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)
    while True:
        now += timedelta(seconds=random.randint(1, 200))
        yield now.strftime("%Y-%m-%dT%H:%M:%SZ")


def uuid(random: Random) -> str:
    """One that was never used."""
    return str(UUID(int=random.getrandbits(128), version=4))


def tools(prose: Prose, count: int) -> list[Document]:
    """Definitions of tools, of some 600 bytes each."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": prose.text(320),
                "parameters": {
                    "type": "object",
                    "properties": {
                        f"field_{place}": {"type": "string", "description": prose.text(60)} for place in range(3)
                    },
                },
            },
        }
        for number in range(count)
    ]


def conversations(
    prose: Prose, random: Random, systems: Iterable[str], each: int, turns: int = 4, **fields: Any
) -> list[Document]:
    """Natural traffic: applications with a system prompt, conversations that go on turn by turn, all mixed."""
    waiting: list[list[Document]] = []
    for system in systems:
        for _ in range(each):
            said: list[str] = []
            queue = []
            for _ in range(turns):
                said.append(prose.text(random.randint(40, 400)))
                queue.append(chat(system, *said, **fields))
                said.append(prose.text(random.randint(200, 1500)))
            waiting.append(queue)
    documents = []
    while waiting:
        queue = random.choice(waiting)
        documents.append(queue.pop(0))
        if not queue:
            waiting.remove(queue)
    return documents


@dataclass
class Request:
    """A prompt as the gateway has read it."""

    pieces: list[bytes]
    demand: Demand


def read(document: Document, model: str = "m", salt: str = "") -> Request:
    """What the gateway makes of a request's body."""
    pieces = canonical_prompt(document).pieces
    keys, edges, _ = prefix_keys(pieces, seed(model, salt))
    size = sum(map(len, pieces))
    return Request(
        pieces, Demand(model, keys=keys, edges=edges, prompt_size=size, prompt_tokens=size // BYTES_PER_TOKEN)
    )


class Cache:
    """One cache for all, which never forgets: hits are whole prefix blocks."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def hit_bytes(self, ask: Demand) -> int:
        """How much is known, and know the rest from now on."""
        hit = max((edge for key, edge in zip(ask.keys, ask.edges, strict=True) if key in self._keys), default=0)
        self._keys.update(ask.keys)
        return hit


def send(
    report: PrefixReport,
    requests: Iterable[Request],
    *,
    cache: Cache | None = None,
    began: float = 0.0,
    apart_seconds: float = 1.0,
    client: Callable[[int], str] = lambda _: "team",
    application: str = "",
    tells_cached: bool = True,
) -> float:
    """Let requests come, one by one, and be answered at once. Gives the time at the end."""
    cache = cache or Cache()
    now = began
    for number, request in enumerate(requests):
        now += apart_seconds
        ask = request.demand
        if report.samples.wants_sample(now):
            report.samples.sample(request.pieces, ask, client(number), application, now)
        report.finished(answered(ask, client(number), cache.hit_bytes(ask) // BYTES_PER_TOKEN, now, tells_cached))
    return now


def answered(ask: Demand, client: str, hit_tokens: int, now: float, tells_cached: bool = True) -> Record:
    """The record of an answered request."""
    record = Record("id", "chat_completions", now)
    record.model, record.client, record.backend, record.outcome = ask.model, client, "b0", "completed"
    record.ended_seconds, record.prompt_tokens = now, ask.prompt_tokens
    record.predicted_hit_tokens = hit_tokens
    record.actual_hit_tokens = hit_tokens if tells_cached else None
    record.demand, record.usage = ask, Usage(ask.prompt_tokens, 10, record.actual_hit_tokens)
    return record


def report_of(report: PrefixReport, now: float, window_seconds: float | None = None) -> dict[str, Any]:
    return make_report(report.snapshot(now, window_seconds), lambda: None)
