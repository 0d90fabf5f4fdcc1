"""A request's answers from submission to the last token, streamed or whole."""

import asyncio
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from loadtest.engine.api.errors import ApiError
from loadtest.engine.api.exchange import EventStream
from loadtest.engine.choice import Choice
from loadtest.engine.engine_loop import Running
from loadtest.engine.fault_injection import StreamFaults
from loadtest.engine.ledger import LedgerEntry
from loadtest.engine.ranks import EngineRanks


class EventWriter(Protocol):
    """Renders the events of one endpoint."""

    def heading(self) -> Sequence[bytes]:
        """Events as soon as the request is accepted, before its prefill."""

    def opening(self) -> Sequence[bytes]:
        """Events that come with the first token, before it."""

    def tokens(self, choice: Choice, start: int, stop: int, last: bool) -> Sequence[bytes]:
        """Events for an answer's tokens from `start` up to `stop`."""

    def closing(self) -> Sequence[bytes]:
        """Events after the last token, the final marker excluded."""

    def done(self) -> Sequence[bytes]:
        """The final marker, if the endpoint has one."""


@dataclass(slots=True, eq=False)
class _Sink:
    """Listens to one answer of a stream."""

    stream: "StreamedGeneration"
    choice: Choice
    _: KW_ONLY
    generated: int = 0
    sent: int = 0
    ended: bool = False

    def on_tokens(self, generated_tokens: int, finished: bool) -> None:
        """Note the progress of the answer, and let the stream send its new part."""
        self.generated = generated_tokens
        self.ended = finished
        self.stream.on_progress(self)

    def send(self, upto: int) -> int:
        """Tokens up to that number are sent now; up to which they were before."""
        before, self.sent = self.sent, max(upto, self.sent)
        return before

    def close(self) -> None:
        """All of it is sent, its end as well."""
        self.ended = False

    def on_failure(self, failure: Exception) -> None:
        """The engine died: so does the stream."""
        self.stream.fail(failure)


class StreamedGeneration:
    """Sends tokens as they come; a slow client gets fewer, longer events. Leaving the `with` block aborts the rest."""

    def __init__(
        self,
        engine: EngineRanks,
        choices: Sequence[Choice],
        writer: EventWriter,
        *,
        stream: EventStream,
        entry: LedgerEntry,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._stream = stream
        self._entry = entry
        self._sinks = [_Sink(self, choice) for choice in choices]
        self._running: list[Running] = []
        self._headed = self._opened = False
        self._unsent_answers = len(choices)
        self._wake = asyncio.Event()
        self._faults = StreamFaults(entry, entry.script, stream, resume=self._resume) if entry.script else None
        self._failure: ApiError | None = None

    def __enter__(self) -> "StreamedGeneration":
        try:
            for sink in self._sinks:
                self._running.append(self._engine.submit(sink.choice, sink, True))
        except ApiError as refusal:
            # vLLM has begun to answer by then: the error is the stream's only event.
            self.fail(refusal)
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            self._engine.abort(running)
        if self._faults:
            self._faults.close()
        self._entry.count((sink.choice.sequence for sink in self._sinks), sum(sink.sent for sink in self._sinks))

    def on_progress(self, sink: _Sink) -> None:
        """An answer has new tokens: send them, or let them gather while the client is slow."""
        if self._stream.congested:
            self._wake.set()
            return
        self._send(sink)

    def fail(self, failure: Exception) -> None:
        """End the stream with an error event."""
        self._failure = failure if isinstance(failure, ApiError) else ApiError(500, str(failure), "InternalServerError")
        self._wake.set()

    def _resume(self) -> None:
        """A fault that held tokens back lets some go."""
        for sink in self._sinks:
            self.on_progress(sink)

    def _send(self, sink: _Sink) -> None:
        upto, ended = sink.generated, sink.ended
        if self._faults:
            sent = sum(other.sent for other in self._sinks)
            allowed = sink.sent + self._faults.allowance(sent, upto - sink.sent)
            upto, ended = min(upto, allowed), ended and upto <= allowed
        events = self._heading()
        if not self._opened and (upto or ended):
            self._opened = True
            events += self._writer.opening()
        start = sink.send(upto)
        if upto > start or (ended and self._unsent_answers):
            events += self._writer.tokens(sink.choice, start, upto, ended)
        if ended:
            sink.close()
            self._unsent_answers -= 1
            if not self._unsent_answers:
                self._finish(events)
                return
        if events:
            self._stream.write(*events)
        if self._faults:
            self._faults.after_send(sum(other.sent for other in self._sinks), self.fail)

    def _heading(self) -> list[bytes]:
        """The events before all others; empty after the first call."""
        events = [] if self._headed else [*self._writer.heading()]
        self._headed = True
        return events

    def _finish(self, events: list[bytes]) -> None:
        script = self._entry.script
        if script and script.die_after_finish:
            self._stream.write(*events)
            self._entry.strike()
            self._stream.break_off(script.die_by)
            return
        events += self._writer.closing()
        if not (script and script.no_done):
            events += self._writer.done()
        self._stream.write(*events)
        self._wake.set()

    async def run(self) -> None:
        """Until all is sent, or the client has gone (CancelledError)."""
        if self._failure is None and (events := self._heading()):
            self._stream.write(*events)
        if self._faults:
            self._faults.after_send(0, self.fail)
        while self._unsent_answers and self._failure is None:
            await self._wake.wait()
            self._wake.clear()
            if self._unsent_answers and self._failure is None:
                await self._stream.drained()
                for sink in self._sinks:
                    if sink.generated > sink.sent or sink.ended:
                        self._send(sink)
        if self._failure is not None:
            self._stream.write(self._failure.event(), *self._writer.done())
        await self._stream.close()


class Generation:
    """Collects whole answers: tokens are read at the end only."""

    def __init__(self, engine: EngineRanks, choices: Sequence[Choice], entry: LedgerEntry) -> None:
        self.choices = choices
        self._engine = engine
        self._entry = entry
        self._running: list[Running] = []
        self._unfinished = len(choices)
        self._generated_tokens = 0  # of answers that are whole
        self._finished = asyncio.Event()
        self._failure: Exception | None = None

    def __enter__(self) -> "Generation":
        self._running = [self._engine.submit(choice, self, False) for choice in self.choices]
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            self._engine.abort(running)
        self._entry.count((choice.sequence for choice in self.choices), self._generated_tokens)

    def on_tokens(self, generated_tokens: int, finished: bool) -> None:
        if finished:
            self._generated_tokens += generated_tokens
            self._unfinished -= 1
            if not self._unfinished:
                self._finished.set()

    def on_failure(self, failure: Exception) -> None:
        self._failure = failure
        self._finished.set()

    async def finished(self) -> None:
        """Wait for all answers; raises the error that ended the engine."""
        await self._finished.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once for any number of answers."""
        seen = {id(choice.prompt): choice.sequence.prompt_tokens for choice in self.choices}
        return sum(seen.values())

    @property
    def output_tokens(self) -> int:
        return sum(choice.sequence.output_tokens for choice in self.choices)
