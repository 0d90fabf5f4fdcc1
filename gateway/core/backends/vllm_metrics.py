"""Reads vLLM's page /metrics: the few lines that matter, the facts in them, and the load. Pure.

The page of a busy server has thousands of lines, and is read every other second. `LineFilter` keeps the relevant lines
while the page arrives, so that neither its size nor its parsing holds up the event loop. `MetricsReader` parses the
labels of a series once, and its value each time.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from operator import itemgetter
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from gateway.core.backends.facts import AdapterReport, Telemetry
from gateway.core.turns import Steps

MAX_LINE_BYTES = 16384  # labels of a longer one would take too long to parse
MAX_LINES = 1024  # the wanted lines of a hundred data-parallel ranks
_MAX_KNOWN = 4096  # series, and the bytes of each
_HEAD_BYTES = 22  # of a line: enough to skip most of the others


class Findings(NamedTuple):
    """The answer of a path: `Facts` by name, and the load if it is /metrics of vLLM."""

    facts: dict[str, Any]
    telemetry: Telemetry | None = None


class _Name(StrEnum):
    RUNNING = "vllm:num_requests_running"
    WAITING = "vllm:num_requests_waiting"
    WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
    KV_USAGE = "vllm:kv_cache_usage_perc"
    PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
    PREEMPTIONS = "vllm:num_preemptions_total"
    GENERATION = "vllm:generation_tokens_total"
    CACHE_CONFIG = "vllm:cache_config_info"
    SLEEP_STATE = "vllm:engine_sleep_state"
    ADAPTERS = "vllm:lora_requests_info"


_PROCESS_START = "process_start_time_seconds"
_WANTED = (*(f"{name}{{".encode() for name in _Name), f"{_PROCESS_START} ".encode())
_HEADS = frozenset(wanted[:_HEAD_BYTES] for wanted in _WANTED)
_ADAPTERS = f"{_Name.ADAPTERS}{{".encode()


class LineFilter:
    """Keeps the wanted lines of a page that comes in pieces, in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._adapters = b""  # the newest line: vLLM adds one for every new set of adapters
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        *lines, rest = (self._rest + piece).split(b"\n")
        self._keep(lines)
        # A line that is too long is cut; its end does not start like a wanted line.
        self._rest = rest if len(rest) <= MAX_LINE_BYTES else b"#"

    def finish(self) -> list[bytes]:
        self._keep([self._rest])
        self._rest = b""
        return [*self._kept, self._adapters] if self._adapters else self._kept

    def _keep(self, lines: list[bytes]) -> None:
        wanted = [line for line in lines if line[:_HEAD_BYTES] in _HEADS and line.startswith(_WANTED)]
        if adapters := [line for line in wanted if line.startswith(_ADAPTERS)]:
            wanted = [line for line in wanted if not line.startswith(_ADAPTERS)]
            self._adapters = max([self._adapters, *adapters], key=_value_of)
        self._kept += wanted[: MAX_LINES - len(self._kept)]


def _value_of(line: bytes) -> float:
    try:
        return float(line.rpartition(b" ")[2])
    except ValueError:
        return -math.inf


class Series(NamedTuple):
    """The name and the labels of a line."""

    name: str
    labels: dict[str, str]


class MetricsReader:
    """Reads the lines that are left of pages. The same series come again and again, of all backends."""

    def __init__(self) -> None:
        self._known: dict[bytes, Series] = {}  # by a line up to its value

    def read(self, lines: Iterable[bytes], at_seconds: float) -> Steps[Findings]:
        """A step for each new series. Raises ValueError if a line is not in the exposition format."""
        samples: defaultdict[str, list[tuple[float, dict[str, str]]]] = defaultdict(list)
        for line in filter(None, lines):
            end = line.rfind(b"}") + 1 or line.find(b" ") + 1
            if (series := self._known.get(line[:end])) is not None:
                text, *_ = line[end:].split()
                value = float(text)
            else:
                yield
                series, value = self._parsed(line, end)
            samples[series.name].append((value, series.labels))
        return _findings(samples, at_seconds)

    def _parsed(self, line: bytes, end: int) -> tuple[Series, float]:
        text = line.decode("utf-8", "replace")
        (sample,) = [sample for family in text_string_to_metric_families(f"{text}\n") for sample in family.samples]
        series = Series(sample.name, sample.labels)
        if end <= _MAX_KNOWN:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[line[:end]] = series
        return series, sample.value


def _findings(samples: defaultdict[str, list[tuple[float, dict[str, str]]]], at_seconds: float) -> Findings:
    def values(name: str) -> list[float]:
        return [value for value, _ in samples[name]]

    running = samples[_Name.RUNNING]
    if not running:
        return Findings({})
    configs = [labels for _, labels in samples[_Name.CACHE_CONFIG]]
    starts = values(_PROCESS_START)
    facts = {
        "engines": max(1, len({labels.get("engine") for _, labels in running})),
        "block_size_tokens": _integer(configs[0].get("block_size")) if configs else None,
        "kv_cache_tokens": sum(filter(None, map(_kv_cache_tokens, configs))) or None,
        "prefix_caching": configs[0].get("enable_prefix_caching") == "True" if configs else None,
        "process_start_seconds": starts[0] if starts else None,
    }
    # Others wait for an adapter, or for blocks from elsewhere.
    by_reason = samples[_Name.WAITING_BY_REASON]
    for_capacity = [value for value, labels in by_reason if labels.get("reason") == "capacity"]
    telemetry = Telemetry(
        at_seconds,
        running=int(sum(values(_Name.RUNNING))),
        waiting=int(sum(for_capacity or values(_Name.WAITING))),
        preemptions=sum(values(_Name.PREEMPTIONS)),
        kv_usage=max(values(_Name.KV_USAGE), default=0.0),
        generation_tokens=sum(values(_Name.GENERATION)) if samples[_Name.GENERATION] else None,
        prefix_queries_tokens=sum(values(_Name.PREFIX_QUERIES)),
        sleep_state=next((labels.get("sleep_state") for value, labels in samples[_Name.SLEEP_STATE] if value), None),
        adapters=_adapters(samples[_Name.ADAPTERS]),
    )
    return Findings(facts, telemetry)


def _adapters(samples: list[tuple[float, dict[str, str]]]) -> AdapterReport | None:
    """The adapters of the newest sample: values are times. An engine without LoRA reports 0 slots."""
    if not samples:
        return None
    _, labels = max(samples, key=itemgetter(0))
    most = _integer(labels.get("max_lora"))
    names = f"{labels.get('running_lora_adapters', '')},{labels.get('waiting_lora_adapters', '')}".split(",")
    return AdapterReport(frozenset(filter(None, map(str.strip, names))), most) if most else None


def _kv_cache_tokens(config: dict[str, str]) -> int | None:
    if (tokens := _integer(config.get("kv_cache_size_tokens"))) is not None:
        return tokens
    # Older versions do not say. The product is too large for models that mix attention kinds.
    blocks, block_size = _integer(config.get("num_gpu_blocks")), _integer(config.get("block_size"))
    if blocks is None or block_size is None or blocks <= 1:  # encoders have no KV cache, only one unused block
        return None
    return blocks * block_size


def _integer(label: str | None) -> int | None:
    """Labels hold Python's text of a value: a number, or None."""
    return int(label) if label is not None and label.isascii() and label.isdigit() else None
