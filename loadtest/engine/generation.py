"""The answers of one request, from submission to the last token. Leaving the `with` block aborts what has not ended."""

import asyncio
from collections.abc import Sequence
from types import TracebackType

from loadtest.engine.choice import Choice
from loadtest.engine.data_parallel import EngineRanks
from loadtest.engine.engine_loop import Running
from loadtest.engine.ledger import Entry


class Generation:
    """Collects whole answers: nobody looks at tokens before the end."""

    def __init__(self, engine: EngineRanks, choices: Sequence[Choice], entry: Entry) -> None:
        self.choices = choices
        self._engine = engine
        self._entry = entry
        self._running: list[Running] = []
        self._unfinished = len(choices)
        self._finished = asyncio.Event()
        self._failure: Exception | None = None

    def __enter__(self) -> "Generation":
        self._running = [self._engine.submit(choice, self, False) for choice in self.choices]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for running in self._running:
            self._engine.abort(running)
        entry = self._entry
        entry.prompt_tokens = sum(choice.sequence.prompt_tokens for choice in self.choices)
        entry.cached_tokens = sum(choice.sequence.cached_tokens for choice in self.choices)

    def on_tokens(self, generated_tokens: int, finished: bool) -> None:
        if finished:
            self._entry.output_tokens += generated_tokens
            self._unfinished -= 1
            if not self._unfinished:
                self._finished.set()

    def on_failure(self, failure: Exception) -> None:
        self._failure = failure
        self._finished.set()

    async def finished(self) -> None:
        """Wait for all answers; raises what ended the engine."""
        await self._finished.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once however many answers it has."""
        seen = {id(choice.prompt): choice.sequence.prompt_tokens for choice in self.choices}
        return sum(seen.values())

    @property
    def output_tokens(self) -> int:
        return sum(choice.sequence.output_tokens for choice in self.choices)
