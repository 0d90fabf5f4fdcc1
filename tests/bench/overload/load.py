"""Loads of so many times what the engines can serve."""

from tests.bench.scenarios import Scenario

SLOTS = 64  # as in gateway.yaml
QUEUED = 32
EVENTS = 20
PACE_MS = 10
SERVICE_SECONDS = EVENTS * PACE_MS / 1000
CAPACITY_PER_S = SLOTS / SERVICE_SECONDS
MULTIPLES = (1, 2, 5, 10)


def scenario(multiple: int, body: str, seconds: float) -> Scenario:
    """Clients that ask, all together, for about this many times the capacity.

    One whose request is refused rests for as long as a served one takes, so that each asks at the same pace: as many
    clients as slots ask for what the engines can serve. Those in the line are on top.
    """
    waiting = QUEUED if multiple > 1 else 0
    title = f"{multiple} x capacity, {body} requests"
    return Scenario(
        f"{multiple}x",
        title,
        body,
        multiple * SLOTS + waiting,
        seconds,
        2.0,
        events=EVENTS,
        pace_ms=PACE_MS,
        refused_pause_ms=round(SERVICE_SECONDS * 1000),
    )
