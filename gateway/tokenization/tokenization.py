"""Exact tokens of prompts, for models with a configured tokenizer that was verified against the backends.

Rendering and encoding run in a separate process. If anything fails there, a request gets None in bounded time, and is
routed by its bytes.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import Any, Final, Literal, NamedTuple, Self

import structlog

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.backends.vllm_api import ControlClient, ControlError
from gateway.config import ConfigError, ModelsConfig
from gateway.supervisor import Supervisor
from gateway.tokenization.conversation import ContentFormat, Feature, decisive
from gateway.tokenization.process import (
    COMMAND,
    Count,
    Job,
    LoadTokenizer,
    ProcessEnded,
    TokenizerProcess,
    running,
)
from gateway.tokenization.verification import EMBEDDED, CannotCompare, Probe, best_format, compared, counts_alike


class TokenizerVerdict(NamedTuple):
    """Whether a backend's tokens of a model are those of the gateway; `counts`: also those of embedded texts."""

    state: Literal["pending", "verified", "refused"] = "pending"
    reason: str = ""
    features: frozenset[Feature] = frozenset()
    counts: bool = False


# Results of tokenizing prompts, and sums. `unknown`: the prompt contains a feature that is not verified.
_RESULTS: Final = ("encoded", "unknown", "late", "busy", "too_long", "failed")
_SUMS: Final = ("segments", "cached_segments", "encode_seconds", "wait_seconds")


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

    def loaded(self, encoding: str) -> None:
        self.encoding, self.failure = encoding, ""

    def not_loaded(self, reason: str) -> None:
        self.failure = reason

    def judged(self, backend: str, verdict: TokenizerVerdict, content_format: ContentFormat | None = None) -> None:
        self.content_format = content_format or self.content_format
        self.verdicts[backend] = verdict
        verified = [each.features for each in self.verdicts.values() if each.state == "verified"]
        self.features = frozenset.intersection(*verified) if verified else frozenset()

    def unload(self) -> None:
        """The tokenizer's process has ended: the next one must be verified again."""
        self.encoding, self.verdicts, self.features = "", {}, frozenset()

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "tokenizer": self.source,
            "encoding": self.encoding or "not loaded",
            "failure": self.failure,
            "content_format": self.content_format.value,
            "features": sorted(each.value for each in self.features),
            "backends": {
                name: {
                    "state": verdict.state,
                    "reason": verdict.reason,
                    "features": sorted(each.value for each in verdict.features),
                    "embeddings": verdict.counts,
                }
                for name, verdict in self.verdicts.items()
            },
        }


HUNG_SECONDS: Final = 10.0
LOAD_SECONDS: Final = 600.0  # a hub's files may have to be fetched
QUESTION_SECONDS: Final = 10.0
_NEEDED: Final = {"chat": Feature.CHAT, "completions": Feature.COMPLETION}

log = structlog.get_logger("gateway")


class TokenizerLimits(NamedTuple):
    """Limits in time, size and number."""

    max_waiting: int = 32  # requests that wait for their tokens; more are routed by their bytes
    max_request_bytes: int = 1048576
    wait_seconds: float = 0.05
    wait_seconds_per_byte: float = 0.5e-6  # less than a tenth of what prefilling such a text takes
    retry_seconds: float = 10.0
    restart_seconds: float = 5.0
    max_batches: int = 4  # of texts to be counted: each waits for those before it
    batch_wait_seconds: float = 0.1
    batch_wait_seconds_per_byte: float = 1e-6  # some four times what counting takes
    pause_seconds: float = 1.0  # without batches, after one that took too long


DEFAULT_BOUNDS: Final = TokenizerLimits()


class NotCounted(StrEnum):
    """Why the tokens of texts are not counted."""

    UNVERIFIED = "unverified"  # no backend was verified to count alike
    FIELDS = "fields"  # of the request, whose effect on tokens is not known
    TOO_LONG = "too_long"
    BUSY = "busy"
    LATE = "late"
    FAILED = "failed"


class Tokenization:
    """Tokenizes prompts inside its `async with` block. Raises ConfigError if the library is not installed.

    The owner calls `look_again` when the fleet has changed, and `forget` when a backend has restarted.
    """

    def __init__(
        self,
        models: ModelsConfig,
        fleet: Fleet,
        clock: Callable[[], float],
        bounds: TokenizerLimits = DEFAULT_BOUNDS,
        command: tuple[str, ...] = COMMAND,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.totals: dict[str, float] = dict.fromkeys(_RESULTS + _SUMS, 0)  # since the start, for metrics
        self._models = {
            name: ModelState(name, model.tokenizer) for name, model in models.by_name.items() if model.tokenizer
        }
        if self._models and not all(map(find_spec, ("transformers", "jinja2"))):
            raise ConfigError(
                f"models.{next(iter(self._models))}.tokenizer: requires packages that are not installed:"
                " pip install 'vllm-batching-gateway[tokenizer]'"
            )
        self._fleet = fleet
        self._clock = clock
        self._bounds = bounds
        self._supervisor = supervisor or Supervisor(clock)
        self._command = command
        self._client = ControlClient(QUESTION_SECONDS, clock)
        self._process: TokenizerProcess | None = None
        self._waiting = 0
        self._batches = 0
        self._paused_until = -math.inf
        self._look = asyncio.Event()
        self._lives: dict[Backend, int] = {}  # counts restarts, so that none is missed while a backend is compared
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._models:
            await self._stack.enter_async_context(self._client)
            for task, step, pause_seconds in (
                ("tokenizer_process", self._run_process, self._bounds.restart_seconds),
                ("tokenizer_comparison", self._compare, self._bounds.retry_seconds),
            ):
                work = self._supervisor.repeat(task, step, pause_seconds)
                self._stack.push_async_callback(_stopped, asyncio.get_running_loop().create_task(work))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def covers(self, model: str) -> bool:
        state = self._models.get(model)
        return state is not None and bool(state.features)

    def accepted(self, model: str, backend: str) -> bool:
        state = self._models.get(model)
        return state is not None and state.verdict(backend).state == "verified"

    async def token_bytes(self, model: str, document: dict[str, Any], endpoint: str, size_bytes: int) -> bytes | None:
        """The packed token ids of a request's prompt; None = not known, or not soon enough. Changes no document."""
        state, process = self._models.get(model), self._process
        if state is None or process is None or _NEEDED.get(endpoint) not in state.features:
            return None
        bounds = self._bounds
        if size_bytes > bounds.max_request_bytes:
            self.totals["too_long"] += 1
            return None
        if self._waiting >= bounds.max_waiting:
            self.totals["busy"] += 1
            return None
        self._waiting += 1
        started = self._clock()
        try:
            async with asyncio.timeout(bounds.wait_seconds + size_bytes * bounds.wait_seconds_per_byte):
                job = Job(0, model, endpoint, decisive(document), state.content_format, list(state.features))
                answer = await process.ask(job, HUNG_SECONDS)
        except TimeoutError:
            self.totals["late"] += 1
            return None
        except (ProcessEnded, TypeError, OverflowError):
            self.totals["failed"] += 1
            return None
        finally:
            self._waiting -= 1
            self.totals["wait_seconds"] += self._clock() - started
        self.totals["encoded" if answer.tokens is not None else "failed" if answer.failed else "unknown"] += 1
        self.totals["segments"] += answer.segments
        self.totals["cached_segments"] += answer.cached_segments
        self.totals["encode_seconds"] += answer.seconds
        return answer.tokens

    def configured(self, model: str) -> bool:
        return model in self._models

    def counts_alike(self, model: str, backend: str) -> bool:
        """Whether this backend was verified to count the tokens of embedded texts alike."""
        state = self._models.get(model)
        return state is not None and state.verdict(backend).counts

    async def count(self, model: str, texts: list[str], size_bytes: int, *, special: bool) -> list[int] | NotCounted:
        """The number of tokens of each text on backends that count alike, in bounded time."""
        serving, process, bounds, started = self._fleet.serving(model), self._process, self._bounds, self._clock()
        if process is None or not any(self.counts_alike(model, each.name) for each in serving or ()):
            return NotCounted.UNVERIFIED
        if size_bytes > bounds.max_request_bytes:
            return NotCounted.TOO_LONG
        if self._batches >= bounds.max_batches or started < self._paused_until:
            return NotCounted.BUSY
        self._batches += 1
        try:
            async with asyncio.timeout(bounds.batch_wait_seconds + size_bytes * bounds.batch_wait_seconds_per_byte):
                answer = await process.ask(Count(0, model, texts, special), HUNG_SECONDS)
        except TimeoutError:
            self._paused_until = self._clock() + bounds.pause_seconds
            return NotCounted.LATE
        except ProcessEnded:
            return NotCounted.FAILED
        finally:
            self._batches -= 1
        return NotCounted.FAILED if answer.tokens is None else answer.counts

    def look_again(self) -> None:
        """Compare with backends that were not compared yet, if there are any."""
        self._look.set()

    def forget(self, backend: Backend) -> None:
        """Verify this backend again: it has restarted."""
        self._lives[backend] = self._lives.get(backend, 0) + 1
        for model in self._models.values():
            if backend.name in model.verdicts:
                model.judged(backend.name, TokenizerVerdict())
        self._look.set()

    def status(self) -> list[dict[str, Any]]:
        return [model.as_dict() for model in self._models.values()]

    async def verify(self, model: str, backend: Backend) -> TokenizerVerdict:
        """Compare a model's tokens with this backend's, and keep the verdict."""
        state, life = self._models[model], self._lives.get(backend, 0)
        process, content_format = self._process, state.content_format
        if process is None or not state.encoding:
            return TokenizerVerdict()

        async def tokenize(probe: Probe, content_format: ContentFormat) -> bytes | None:
            job = Job(0, model, probe.endpoint, decisive(dict(probe.document)), content_format, list(Feature))
            return (await process.ask(job, HUNG_SECONDS)).tokens

        try:
            comparisons = await compared(model, backend, self._client, tokenize)
            if not state.features:
                content_format = best_format(comparisons)
            comparison = comparisons[content_format]
            if comparison.alike:
                counts, differs = await self._counts(process, model, backend)
                verdict = TokenizerVerdict("verified", differs, comparison.features, counts)
            else:
                verdict = TokenizerVerdict(
                    "refused", comparison.difference or "neither the gateway nor the backend renders any prompt"
                )
        except CannotCompare as error:
            verdict = TokenizerVerdict("refused", str(error))
        except (ControlError, ProcessEnded) as error:
            verdict = TokenizerVerdict("pending", str(error))
        if life != self._lives.get(backend, 0) or process is not self._process:
            return TokenizerVerdict()  # it has restarted meanwhile
        self._log_verdict(state, backend, verdict)
        state.judged(backend.name, verdict, content_format if verdict.state == "verified" else None)
        return verdict

    async def _counts(self, process: TokenizerProcess, model: str, backend: Backend) -> tuple[bool, str]:
        """Whether this backend counts the tokens of embedded texts alike, and what differs."""
        answer = await process.ask(Count(0, model, list(EMBEDDED), True), HUNG_SECONDS)
        if answer.tokens is None:
            return False, answer.reason
        return await counts_alike(model, backend, self._client, answer.counts)

    def _log_verdict(self, state: ModelState, backend: Backend, verdict: TokenizerVerdict) -> None:
        if verdict == state.verdicts.get(backend.name):
            return
        about = {"model": state.name, "backend": backend.name}
        match verdict.state:
            case "verified":
                features = sorted(each.value for each in verdict.features)
                log.info("tokens_verified", **about, features=features, embeddings=verdict.counts)
                if verdict.reason:
                    log.warning("embedding_tokens_differ", **about, reason=verdict.reason)
            case "refused":
                log.warning("tokens_refused", **about, reason=verdict.reason)
            case "pending":
                log.info("tokens_not_compared_yet", **about, reason=verdict.reason)

    async def _run_process(self) -> None:
        """Run one tokenizer process until it ends, then pause; the supervisor repeats this."""
        try:
            async with running(self._command) as process:
                self._process = process
                self._look.set()
                await process.listen()
        except OSError as error:
            log.error("tokenizer_process_not_started", reason=str(error))
        else:
            log.warning("tokenizer_process_ended")
        finally:
            self._process = None
            for model in self._models.values():
                model.unload()
        await asyncio.sleep(self._bounds.restart_seconds)

    async def _compare(self) -> None:
        """Load tokenizers and compare backends where it was not done yet; return when it is time to do it again."""
        self._look.clear()
        try:
            done = await self._load_and_compare()
        except ProcessEnded:
            done = True  # the next process asks for another look
        with suppress(TimeoutError):
            async with asyncio.timeout(None if done else self._bounds.retry_seconds):
                await self._look.wait()

    async def _load_and_compare(self) -> bool:
        """Whether all of it is done, with nothing to retry."""
        done = True
        for model in self._models.values():
            if not model.encoding and not await self._load(model):
                done = False
                continue
            for backend in self._fleet.backends:
                serves = any(card.id == model.name for card in backend.facts.models)
                reachable = backend.health.state != "down"
                if serves and reachable and model.verdict(backend.name).state == "pending":
                    done &= (await self.verify(model.name, backend)).state != "pending"
        return done

    async def _load(self, model: ModelState) -> bool:
        process = self._process
        if process is None:
            return False
        answer = await process.ask(LoadTokenizer(0, model.name, model.source), LOAD_SECONDS)
        if answer.tokens is None:
            if answer.reason != model.failure:
                log.error("tokenizer_not_loaded", model=model.name, tokenizer=model.source, reason=answer.reason)
            model.not_loaded(answer.reason)
            return False
        model.loaded(answer.reason)
        log.info("tokenizer_loaded", model=model.name, encodes=answer.reason, seconds=round(answer.seconds, 3))
        return True


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
