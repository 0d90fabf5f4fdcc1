"""Prompts of a recorded trace: a block hash is always the same text, so that prefixes are shared as recorded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median

from loadtest.replay.formats import read_trace
from loadtest.replay.trace import Row, Trace, TraceError
from loadtest.workloads.prompts import NO_GROUP, Prompt, Source, Turn
from loadtest.workloads.spec import WorkloadSpec


def trace_of(spec: WorkloadSpec) -> Trace:
    """The trace that a workload names. Raises TraceError."""
    if spec.file is None:
        raise TraceError("--workload trace: give the file with --trace")
    return read_trace(Path(spec.file.path), spec.block_tokens)


class TraceSource(Source):
    """One conversation a row, or a session of several; the texts are made up, their lengths and repetitions are not."""

    def __init__(self, spec: WorkloadSpec) -> None:
        super().__init__(spec)
        trace = trace_of(spec)
        self._block_tokens = trace.block_tokens
        rng = random.Random(f"{spec.seed}-ticks")
        came = [(rows[0].at_seconds + rng.random() * trace.tick_seconds, rows) for rows in conversations(trace)]
        came.sort(key=itemgetter(0))  # times that were rounded are spread, which changes their order
        self.arrivals_seconds = [at for at, _ in came]
        self._conversations = [rows for _, rows in came]
        self.count = len(came)
        self._warmup_tokens = round(median(row.prompt_tokens for row in trace.rows))

    def turns(self, index: int) -> Iterator[Turn]:
        """A row's prompt holds all that was said before it, so no turn needs the answers of earlier ones."""
        for number, row in enumerate(self._conversations[index]):
            yield Turn(self._prompt(row, f"{index}-{number}"), row.think_seconds)

    def warmup(self, index: int) -> Prompt:
        """As long as the usual prompt of the trace."""
        return Prompt(NO_GROUP, "", self.distinct(f"warm-up {index}", self._warmup_tokens), self.spec.max_tokens)

    def _prompt(self, row: Row, label: str) -> Prompt:
        own_tokens = row.prompt_tokens - len(row.keys) * self._block_tokens
        own = self.distinct(f"request {label}", own_tokens) if own_tokens else ""
        text = "".join(self._block(key) for key in row.keys) + own
        group = row.keys[0] if row.keys else NO_GROUP
        return Prompt(group, "", text, row.output_tokens, row.prompt_tokens)

    def _block(self, key: int) -> str:
        rng = random.Random(f"{self.spec.seed}-block-{key}")
        return self._headed(f"{key:x}: ", rng, self._block_tokens)


def conversations(trace: Trace) -> list[list[Row]]:
    """Rows of one session together, in order of the sessions' starts; a row without a session is alone."""
    if not trace.sessions:
        return [[row] for row in trace.rows]
    rows = sorted(trace.rows, key=lambda row: row.session or 0)
    found = [list(turns) for _, turns in groupby(rows, key=lambda row: row.session)]
    return sorted(found, key=lambda turns: turns[0].at_seconds)
