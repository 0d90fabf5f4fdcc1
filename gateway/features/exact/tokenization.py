"""Exact tokens of prompts, for models with a configured tokenizer that was verified against the backends.

Rendering and encoding run in a separate process. If anything fails there, a request gets None in bounded time, and is
routed by its bytes. A backend is verified if its tokens of the probes equal the gateway's.
"""

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec
import structlog

from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.vllm_api import ControlClient, ControlError
from gateway.core.supervisor import Supervisor
from gateway.features.exact.conversation import EMBEDDED, PROBES, ContentFormat, Probe, PromptFeature, decisive
from gateway.features.exact.prompts import RESULTS
from gateway.features.exact.tokenizer import Count, Job, LoadTokenizer, ProcessEnded, TokenizerProcess, TokenizerReply
from gateway.features.models.settings import ModelsConfig

LOAD_SECONDS: Final = 600.0  # a hub's files may have to be fetched
QUESTION_SECONDS: Final = 10.0
_NEEDED: Final = {"chat": PromptFeature.CHAT, "completions": PromptFeature.COMPLETION}

_TOKENIZE_PATH: Final = "/tokenize"
_EMBEDDINGS_PATH: Final = "/v1/embeddings"
NOT_COMPARABLE: Final = (200, 404, 405, 501)  # the backend does not expose its tokens; 200: its answer has none
_REFUSED: Final = (400, 422)  # the backend cannot render this prompt
_PASSING: Final = (None, 429, 503)  # ask again
_HINTS: Final = {
    PromptFeature.COMPLETION: "the backend uses a different tokenizer, tokenizer revision or tokenizer mode",
    PromptFeature.CHAT: "the backend uses a different chat template, or one of the flags --chat-template,"
    " --chat-template-content-format, --default-chat-template-kwargs",
}

Tokenize = Callable[[Probe, ContentFormat], Awaitable[list[int] | None]]
log = structlog.get_logger("gateway")


class QuestionLimits(NamedTuple):
    """Limits of questions of one kind, in number, time and size."""

    max_waiting: int
    wait_seconds: float
    wait_seconds_per_byte: float
    pause_seconds: float = 0.0  # without questions, after a slow one
    max_bytes: int = 1048576


class TokenizerLimits(NamedTuple):
    """Limits of all questions, and pauses between attempts."""

    # More prompts are routed by their bytes. The wait is less than a tenth of the time to prefill such a text.
    prompts: QuestionLimits = QuestionLimits(32, 0.05, 0.5e-6)
    # Of texts to be counted: each waits for all before it, some four times as long as counting takes.
    batches: QuestionLimits = QuestionLimits(4, 0.1, 1e-6, pause_seconds=1.0)
    retry_seconds: float = 10.0
    restart_seconds: float = 5.0


DEFAULT_LIMITS: Final = TokenizerLimits()


class NotCounted(StrEnum):
    """Why the tokens of texts are not known."""

    UNVERIFIED = "unverified"  # no backend was verified to count alike
    TOO_LONG = "too_long"
    BUSY = "busy"
    LATE = "late"
    FAILED = "failed"


class Questions:
    """Questions of one kind to the process; each is answered in bounded time."""

    def __init__(self, process: TokenizerProcess, limits: QuestionLimits, clock: Callable[[], float]) -> None:
        self.waiting = 0
        self._process = process
        self._limits = limits
        self._clock = clock
        self._paused_until = -math.inf

    async def ask(self, question: Job | Count, size_bytes: int) -> TokenizerReply | NotCounted:
        limits = self._limits
        if size_bytes > limits.max_bytes:
            return NotCounted.TOO_LONG
        if self.waiting >= limits.max_waiting or self._clock() < self._paused_until:
            return NotCounted.BUSY
        self.waiting += 1
        try:
            async with asyncio.timeout(limits.wait_seconds + size_bytes * limits.wait_seconds_per_byte):
                return await self._process.ask(question)
        except TimeoutError:
            self._paused_until = self._clock() + limits.pause_seconds
            return NotCounted.LATE
        except (ProcessEnded, TypeError, OverflowError):
            return NotCounted.FAILED
        finally:
            self.waiting -= 1


class TokenizerVerdict(NamedTuple):
    """Whether a backend's tokens of a model equal the gateway's; `counts`: also for embedded texts."""

    state: Literal["pending", "verified", "refused"] = "pending"
    reason: str = ""
    features: frozenset[PromptFeature] = frozenset()  # that both sides render alike
    counts: bool = False

    def as_dict(self) -> dict[str, Any]:
        features = sorted(feature.value for feature in self.features)
        return {"state": self.state, "reason": self.reason, "features": features, "embeddings": self.counts}


Verdicts = dict[ContentFormat, TokenizerVerdict]


@dataclass
class ModelState:
    """One model's tokenizer, and the backends that it was compared with."""

    name: str
    source: str
    _: KW_ONLY
    encoding: str = ""  # how its texts are encoded; empty = not loaded
    failure: str = ""
    content_format: ContentFormat = ContentFormat.STRING
    verdicts: dict[str, TokenizerVerdict] = field(default_factory=dict)
    features: frozenset[PromptFeature] = frozenset()  # verified on every verified backend

    def verdict(self, backend: str) -> TokenizerVerdict:
        return self.verdicts.get(backend, TokenizerVerdict())

    def loaded(self, reply: TokenizerReply) -> bool:
        self.encoding, self.failure = (reply.reason, "") if reply.tokens is not None else ("", reply.reason)
        return bool(self.encoding)

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


class Tokenization:
    """Tokenizes prompts inside its `async with` block. Its process runs while a model has a tokenizer.

    The owner calls `look_again` when the fleet has changed, and `forget` when a backend has restarted.
    """

    def __init__(
        self,
        models: ModelsConfig,
        fleet: Fleet,
        clock: Callable[[], float],
        *,
        limits: TokenizerLimits = DEFAULT_LIMITS,
        process: TokenizerProcess | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.totals = dict.fromkeys(RESULTS, 0)  # prompts since the start, by result
        self._models: dict[str, ModelState] = {}
        self._fleet = fleet
        self._limits = limits
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock)
        self._client = ControlClient(QUESTION_SECONDS, clock)
        self._process = process or TokenizerProcess()
        self._prompts = Questions(self._process, limits.prompts, clock)
        self._batches = Questions(self._process, limits.batches, clock)
        self._look = asyncio.Event()
        self._wanted = asyncio.Event()  # set while there are models with a tokenizer
        self._stack = AsyncExitStack()
        self.apply(models)

    async def __aenter__(self) -> Self:
        enter, repeating, limits = self._stack.enter_async_context, self._supervisor.repeating, self._limits
        await enter(self._client)
        await enter(repeating("tokenizer_process", self._run_process, limits.restart_seconds))
        await enter(repeating("tokenizer_comparison", self._compare, limits.retry_seconds))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def apply(self, models: ModelsConfig) -> None:
        """Take over other tokenizers; unchanged ones remain loaded and verified. Without any the process ends."""
        sources = {name: model.tokenizer for name, model in models.by_name.items() if model.tokenizer}
        known = {state.name: state for state in self._models.values() if sources.get(state.name) == state.source}
        self._models = {name: known.get(name) or ModelState(name, source) for name, source in sources.items()}
        if self._models:
            self._wanted.set()
            self._look.set()
        else:
            self._wanted.clear()
            self._process.end()

    @property
    def is_used(self) -> bool:
        """Whether any model has a tokenizer."""
        return bool(self._models)

    def __contains__(self, model: object) -> bool:
        """Whether the prompts of this model can be tokenized."""
        state = self._models.get(str(model))
        return state is not None and bool(state.features)

    async def token_bytes(self, model: str, document: dict[str, Any], endpoint: str, size_bytes: int) -> bytes | None:
        """The packed token ids of a request's prompt; None = not known, or not soon enough. Changes no document."""
        state = self._models.get(model)
        if state is None or _NEEDED.get(endpoint) not in state.features:
            return None
        job = Job(
            model, endpoint, decisive(document), content_format=state.content_format, features=list(state.features)
        )
        reply = await self._prompts.ask(job, size_bytes)
        if isinstance(reply, NotCounted):
            self.totals[reply.value] += 1
            return None
        self.totals["encoded" if reply.tokens is not None else "failed" if reply.failed else "unknown"] += 1
        return reply.tokens

    def configured(self, model: str) -> bool:
        return model in self._models

    def counts_alike(self, model: str, backend: str) -> bool:
        """Whether this backend was verified to count the tokens of embedded texts alike."""
        return self._verdict(model, backend).counts

    async def count(self, model: str, texts: list[str], size_bytes: int, *, special: bool) -> list[int] | NotCounted:
        """The number of tokens of each text on backends that count alike, in bounded time."""
        if not any(self.counts_alike(model, backend.name) for backend in self._fleet.serving(model) or ()):
            return NotCounted.UNVERIFIED
        reply = await self._batches.ask(Count(model, texts, special), size_bytes)
        if isinstance(reply, NotCounted):
            return reply
        return NotCounted.FAILED if reply.tokens is None else reply.counts

    def _verdict(self, model: str, backend: str) -> TokenizerVerdict:
        state = self._models.get(model)
        return TokenizerVerdict() if state is None else state.verdict(backend)

    def accepted(self, model: str, backend: str) -> bool:
        return self._verdict(model, backend).state == "verified"

    def verdicts(self, backend: str) -> dict[str, dict[str, Any]]:
        """For operators: the verdicts on this backend, by model."""
        models = self._models.values()
        return {model.name: model.verdicts[backend].as_dict() for model in models if backend in model.verdicts}

    def look_again(self) -> None:
        """Compare with new backends, if there are any."""
        self._look.set()

    def forget(self, backend: Backend) -> None:
        """Verify this backend again: it has restarted."""
        for model in self._models.values():
            if backend.name in model.verdicts:
                model.judged(backend.name, TokenizerVerdict())
        self._look.set()

    def left(self, backend: Backend) -> None:
        for model in self._models.values():
            model.verdicts.pop(backend.name, None)
        self._look.set()  # its name may be another's by now

    async def _run_process(self) -> None:
        """Run one tokenizer process until it ends, then pause; the supervisor repeats this."""
        await self._wanted.wait()
        try:
            await self._process.run(self._started)
        except OSError as error:
            log.error("tokenizer_process_not_started", reason=str(error))
        else:
            if self._wanted.is_set():
                log.warning("tokenizer_process_ended")
        finally:
            for model in self._models.values():
                model.unload()
        if self._wanted.is_set():
            await asyncio.sleep(self._limits.restart_seconds)

    def _started(self) -> None:
        if self._wanted.is_set():
            self._look.set()
        else:
            self._process.end()

    async def _compare(self) -> None:
        """Load missing tokenizers and compare new backends; return when it is time to do it again."""
        self._look.clear()
        done = all([await self._compare_all(model) for model in self._models.values()])
        with suppress(TimeoutError):
            async with asyncio.timeout(None if done else self._limits.retry_seconds):
                await self._look.wait()

    async def _compare_all(self, model: ModelState) -> bool:
        """Whether all of it is done, with nothing to retry."""
        done = True
        try:
            if not model.encoding and not await self._load(model):
                return False
            for backend in self._fleet.backends:
                serves = any(card.id == model.name for card in backend.facts.models)
                reachable = backend.health.state != "down"
                if serves and reachable and model.verdict(backend.name).state == "pending":
                    done &= await self._verify(model, backend)
        except ProcessEnded:
            return True  # the next process asks for another look
        return done

    async def _load(self, model: ModelState) -> bool:
        started = self._clock()
        reply = await self._process.ask(LoadTokenizer(model.name, model.source), LOAD_SECONDS)
        if reply.tokens is not None:
            seconds = round(self._clock() - started, 3)
            log.info("tokenizer_loaded", model=model.name, encodes=reply.reason, seconds=seconds)
        elif reply.reason != model.failure:
            log.error("tokenizer_not_loaded", model=model.name, tokenizer=model.source, reason=reply.reason)
        return model.loaded(reply)

    async def _verify(self, model: ModelState, backend: Backend) -> bool:
        """Compare a model's tokens with this backend's, and keep the verdict; False = to be tried again."""

        async def tokenize(probe: Probe, content_format: ContentFormat) -> list[int] | None:
            job = Job(
                model.name,
                probe.endpoint,
                decisive(dict(probe.document)),
                content_format=content_format,
                features=list(PromptFeature),
            )
            tokens = (await self._process.ask(job)).tokens
            return None if tokens is None else array("I", tokens).tolist()

        before, pending, content_format = model.verdict(backend.name), model.begin_comparison(backend.name), None
        try:
            verdicts = await compared(model.name, backend, self._client, tokenize)
            content_format = model.content_format if model.features else best_format(verdicts)
            verdict = verdicts[content_format]
            if verdict.state == "verified":
                ours = await self._process.ask(Count(model.name, list(EMBEDDED), True))
                alike, differs = False, ours.reason
                if ours.tokens is not None:
                    alike, differs = await counted_alike(model.name, backend, self._client, ours.counts)
                verdict = verdict._replace(reason=differs, counts=alike)
        except ControlError as error:
            verdict = TokenizerVerdict("refused" if error.status in NOT_COMPARABLE else "pending", str(error))
        if model.verdicts.get(backend.name) is not pending:
            return False  # it has restarted meanwhile
        if verdict != before:
            _log_verdict(model.name, backend.name, verdict)
        model.judged(backend.name, verdict, content_format if verdict.state == "verified" else None)
        return verdict.state != "pending"


def _log_verdict(model: str, backend: str, verdict: TokenizerVerdict) -> None:
    line = log.bind(model=model, backend=backend)
    if verdict.state == "verified":
        line.info("tokens_verified", features=verdict.as_dict()["features"], embeddings=verdict.counts)
        if verdict.reason:
            line.warning("embedding_tokens_differ", reason=verdict.reason)
    elif verdict.state == "refused":
        line.warning("tokens_refused", reason=verdict.reason)
    else:
        line.info("tokens_not_compared_yet", reason=verdict.reason)


async def compared(model: str, backend: Backend, client: ControlClient, tokenize: Tokenize) -> Verdicts:
    """The verdict for each content format. Raises ControlError; if not `NOT_COMPARABLE`, a retry may succeed."""
    theirs = [await _theirs(model, backend, client, probe) for probe in PROBES]
    return {each: compare([await tokenize(probe, each) for probe in PROBES], theirs) for each in ContentFormat}


def best_format(verdicts: Verdicts) -> ContentFormat:
    """The content format with the most features that are alike."""
    return max(verdicts, key=lambda each: len(verdicts[each].features))


async def _theirs(model: str, backend: Backend, client: ControlClient, probe: Probe) -> list[int] | None:
    try:
        answer = await client.ask(backend.config, _TOKENIZE_PATH, {"model": model, **probe.document})
        return msgspec.convert(answer["tokens"], list[int])
    except ControlError as error:
        if error.status in _REFUSED:
            return None
        raise
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ControlError(f"{_TOKENIZE_PATH} returned no list of tokens", 200) from error


async def counted_alike(model: str, backend: Backend, client: ControlClient, ours: list[int]) -> tuple[bool, str]:
    """Whether the backend counts the texts of `EMBEDDED` like `ours` when it embeds them; the difference, if it embeds.

    Raises ControlError if it is worth another try.
    """
    for text, count in zip(EMBEDDED, ours, strict=True):
        try:
            answer = await client.ask(backend.config, _EMBEDDINGS_PATH, {"model": model, "input": text})
            theirs = answer["usage"]["prompt_tokens"]
        except ControlError as error:
            if error.status in _PASSING:
                raise
            return False, ""
        except (KeyError, TypeError):
            return False, f"{_EMBEDDINGS_PATH} returned no usage"
        if theirs != count:
            return False, f"{_EMBEDDINGS_PATH} counts {theirs} tokens where the gateway counts {count}"
    return True, ""


def compare(ours: Sequence[list[int] | None], theirs: Sequence[list[int] | None]) -> TokenizerVerdict:
    """Both sides' answers to `PROBES`, in their order; None = that side refuses the prompt.

    A probe that both refuse says nothing (templates may refuse system turns, and some models have no template).
    """
    rendered: set[PromptFeature] = set()
    unlike: dict[PromptFeature, str] = {}
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
