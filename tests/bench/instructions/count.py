"""Counts the instructions of every workload under callgrind, which no other process disturbs."""

import ctypes
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.instructions import lines, workloads
from tests.bench.instructions.workloads import Counter

_EMPTY = "nothing"
_UNROUTED = ".unrouted"
_LONG, _SHORT = 120, 20  # events of a stream


@dataclass(frozen=True)
class Row:
    """One figure: the instructions of a workload for each of `units`; `less` is subtracted first.

    `unrouted`: the same without a gateway, which is subtracted, too: what the fake ends of the connections cost.
    `has_budget`: false = it is counted only if it is named.
    """

    name: str
    title: str
    units: int
    run: Callable[[Counter], None]
    less: str = ""
    blocks: int = 1  # counted blocks; entering and leaving one costs a little
    unrouted: Callable[[Counter], None] | None = None
    has_budget: bool = True


ROWS = [
    Row(_EMPTY, "an empty block", 200, lambda counter: _nothing(counter, 200), blocks=0),
    *[
        Row(
            f"chat_{size}",
            f"{size[:-1]} KB chat",
            units,
            lambda counter, size=size, units=units: workloads.chat(counter, size, units),
            unrouted=lambda counter, size=size, units=units: workloads.chat(counter, size, units, through=False),
        )
        for size, units in (("1k", 100), ("16k", 50))
    ],
    *[
        Row(
            name,
            title,
            100,
            lambda counter, ratio=ratio: workloads.chat(
                counter, "1k", 100, sections={"tracing": workloads.traces(ratio)}
            ),
            less,
            unrouted=lambda counter: workloads.chat(counter, "1k", 100, through=False),
        )
        for name, title, ratio, less in (
            ("chat_1k_unsampled", "1 KB chat whose trace is not sampled", 0.0, ""),
            ("chat_1k_sampled", "what a sampled 1 KB chat takes more on the event loop", 1.0, "chat_1k"),
        )
    ],
    Row("export", "sampled 1 KB chat, encoded and sent", 512, lambda counter: workloads.exported(counter, 512)),
    *[
        Row(
            name,
            title,
            units,
            lambda counter, events=events: workloads.streamed(counter, events, 20),
            less,
            unrouted=lambda counter, events=events: workloads.streamed(counter, events, 20, through=False),
        )
        for name, title, units, events, less in (
            ("stream_short", f"stream of {_SHORT} events", 20, _SHORT, ""),
            ("event", "streamed event", 20 * (_LONG - _SHORT), _LONG, "stream_short"),
        )
    ],
    *[
        Row(
            name,
            title,
            96,
            lambda counter, run=run, streams=streams: run(counter, 96, streams=streams),
            unrouted=lambda counter, streams=streams: lines.asked(counter, 96, streams=streams, through=False),
            has_budget=False,
        )
        for name, title, run, streams in (
            ("batch_line", f"line of a batch, {lines.TOKENS} events", lines.batched, True),
            ("batch_line_whole", "line of a batch that is sent whole", lines.batched, False),
            ("like_line_streamed", "the same request, streamed", lines.asked, True),
            ("like_line_plain", "the same request, not streamed", lines.asked, False),
        )
    ],
    Row("input_line", "1.5 KB line of an input file, checked", 2000, lambda counter: lines.checked(counter, 2000)),
    Row("embedding", "embeddings text, in batches", 640, lambda counter: workloads.embedded(counter, 640), blocks=10),
    *[
        Row(
            f"place_{engines}",
            f"placement among {engines} engines",
            100,
            lambda counter, engines=engines: workloads.placed(counter, engines, 100),
            blocks=100,
        )
        for engines in (8, 64, 256)
    ],
    *[
        Row(
            f"release_{waiting}_{tenants}",
            f"release, {waiting:,} waiting, {tenants:,} tenants",
            50,
            lambda counter, waiting=waiting, tenants=tenants: workloads.released(counter, waiting, tenants, 50),
            blocks=50,
        )
        for waiting, tenants in ((256, 1), (4096, 1), (256, 100), (4096, 1000))
    ],
]


def _nothing(counter: Counter, blocks: int) -> None:
    counter.begin()
    for _ in range(blocks):
        with counter.counting():
            pass


class Callgrind:
    """The counter, inside valgrind."""

    def __init__(self, library: Path) -> None:
        self._calls = ctypes.CDLL(str(library))

    def begin(self) -> None:
        gc.collect()
        gc.freeze()  # as the gateway does: else what it is made of decides when a collection comes, and what it costs
        self._calls.counting_begin()

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._calls.counting_toggle()
        try:
            yield
        finally:
            self._calls.counting_toggle()

    def end(self, name: str) -> None:
        self._calls.counting_end(name.encode())


def count(library: Path, names: list[str], say: Callable[[str], None]) -> dict[str, int]:
    """Instructions of each row, by name, each counted in a process of its own. `names`: none = all with a budget."""
    wanted = [row for row in ROWS if row.name in names or (row.has_budget and not names) or row.name == _EMPTY]
    wanted += [row for row in ROWS if row not in wanted and any(row.name == other.less for other in wanted)]
    runs = [name for row in wanted for name in ([row.name, row.name + _UNROUTED] if row.unrouted else [row.name])]
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def counted(name: str) -> int:
            say(f"counting {name}")
            return _total(name, library, Path(scratch))

        totals = dict(zip(runs, pool.map(counted, runs), strict=True))
    for row in wanted:
        totals[row.name] -= totals.get(row.name + _UNROUTED, 0)
    empty = totals[_EMPTY] / ROWS[0].units
    figures = {}
    for row in wanted:
        total = totals[row.name] - row.blocks * empty - (totals[row.less] if row.less else 0)
        figures[row.name] = round(total / row.units)
    return {name: figure for name, figure in figures.items() if name != _EMPTY}


def _total(name: str, library: Path, scratch: Path) -> int:
    out = scratch / f"{name}.out"
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
    command += [f"--callgrind-out-file={out}"]
    command += [sys.executable, "-m", "tests.bench.instructions.count", name, str(library)]
    # The same collisions of hashes, and the same places in memory, whatever else the environment holds.
    environment = {name: os.environ[name] for name in ("GATEWAY_PURE", "PATH") if name in os.environ}
    environment["PYTHONHASHSEED"] = "0"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    dump = out.with_name(f"{out.name}.1")  # the first; the last is made at the end of the program
    if done.returncode or not dump.exists():
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    totals = re.findall(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)
    return int(totals[0])


def main(name: str, library: str) -> None:
    """One workload, inside valgrind."""
    row = next(row for row in ROWS if row.name == name.removesuffix(_UNROUTED))
    run = row.unrouted if row.unrouted and name.endswith(_UNROUTED) else row.run
    counter = Callgrind(Path(library))
    run(counter)
    counter.end(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
