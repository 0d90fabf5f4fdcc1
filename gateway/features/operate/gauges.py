"""Metrics of the process itself: its build, learned values, its memory, and failed lines and tasks."""

from functools import partial
from platform import python_version

from gateway import BUILD, __version__
from gateway.core.backends.fleet import Fleet
from gateway.core.observe.log import LineWriter
from gateway.core.observe.metrics import Labels, Metrics, ProcessMetrics
from gateway.core.resources import MemoryBudget
from gateway.core.routing.estimates import Calibrations
from gateway.core.supervisor import Supervisor


def add_gauges(
    metrics: Metrics,
    fleet: Fleet,
    calibrations: Calibrations,
    memory: MemoryBudget,
    access_log: LineWriter | None,
    log: LineWriter | None,
    supervisor: Supervisor,
) -> None:
    gauge, counter = metrics.gauge, metrics.counter
    gauge(
        "gateway_prefill_seconds_per_token",
        "Learned prefill time of an uncached token, by model.",
        ("model",),
        lambda: [((name,), calibrations.of(name).model.b) for name in fleet.families()],
    )
    gauge(
        "gateway_build_info",
        "Version, build (compiled = modules of a request's path, or python) and Python's version; always 1.",
        ("version", "build", "python"),
        lambda: [((__version__, BUILD, python_version()), 1)],
    )
    metrics.include(ProcessMetrics())
    text = "Memory used by bodies, uploads, queue and buffered responses."
    gauge("gateway_held_bytes", text, (), partial(_number, memory, "used_bytes"))
    text = "Limit of that memory: server.memory_budget_bytes."
    gauge("gateway_held_bytes_limit", text, (), partial(_number, memory, "limit_bytes"))
    for name, lines, writer in (
        ("gateway_access_log_dropped_lines_total", "Access-log lines", access_log),
        ("gateway_log_dropped_lines_total", "Log lines", log),
    ):
        text = f"{lines} dropped because they could not be written."
        counter(name, text, (), partial(_number, writer, "dropped"))
    counter(
        "gateway_background_errors_total",
        "Exceptions in background tasks, which continue (a bug).",
        ("task",),
        lambda: [((task,), errors) for task, errors in supervisor.faults.items()],
    )


def _number(owner: object, attribute: str) -> list[tuple[Labels, int]]:
    """The one value of a metric without labels; 0 while there is no owner."""
    return [((), getattr(owner, attribute, 0))]
