"""What is measured during a soak, and what must hold of it at the end. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from tests.recounted_gateway import LIVE_BYTES, VIOLATIONS

MEBIBYTE = 1048576
PER_REQUESTS = 100_000
MAX_SLOPE_MIB = 1.0  # per 100,000 requests
_MOST_SAMPLES = 500
ENOUGH_REQUESTS = 600_000  # in fewer, tables of a fixed size are not full after the warm-up: the largest takes 110,000
# Series that must be there and be 0 at rest, by their beginnings.
ZERO_GAUGES = (
    "gateway_backend_in_flight{",
    "gateway_backend_kv_tokens_reserved{",
    "gateway_queued_requests{",
    "gateway_held_bytes",
)
LIMITS = ("gateway_held_bytes_limit",)  # begin like one of them, and are never 0
ZERO_IF_THERE = (VIOLATIONS, LIVE_BYTES, "gateway_access_log_dropped_lines")


@dataclass(frozen=True)
class Sample:
    """One look at the process."""

    requests: int
    rss_bytes: int


@dataclass(frozen=True)
class AtRest:
    """What the gateway has open while nobody asks."""

    open_files: int = 0
    threads: int = 0
    rss_bytes: int = 0


def slope_mib(samples: Sequence[Sample]) -> float:
    """Growth of the memory in MiB per 100,000 requests; 0 for fewer than two points.

    The median of the slopes between all pairs of samples (Theil-Sen): a table of a fixed size that doubles on its way
    there is one step, which least squares would take for growth.
    """
    looked = samples[:: max(1, len(samples) // _MOST_SAMPLES)]
    slopes = [
        (later.rss_bytes - earlier.rss_bytes) / (later.requests - earlier.requests)
        for earlier, later in combinations(looked, 2)
        if later.requests != earlier.requests
    ]
    return median(slopes) * PER_REQUESTS / MEBIBYTE if slopes else 0.0


def busy_gauges(metrics: dict[str, float]) -> list[str]:
    """What is not at rest by the metrics; a series that must be there and is not counts, too."""
    found = [f"{name} is missing" for name in ZERO_GAUGES if not any(series.startswith(name) for series in metrics)]
    return found + [
        f"{series} is {value:g}"
        for series, value in metrics.items()
        if value and series.startswith(ZERO_GAUGES + ZERO_IF_THERE) and not series.startswith(LIMITS)
    ]


def lag_share_above(metrics: dict[str, float], seconds: str = "0.05") -> float:
    """The share of looks at the event loop that were later than one of the histogram's bounds."""
    count = metrics.get("gateway_event_loop_lag_seconds_count", 0.0)
    within = metrics.get(f'gateway_event_loop_lag_seconds_bucket{{le="{seconds}"}}', 0.0)
    return 1 - within / count if count else 0.0
