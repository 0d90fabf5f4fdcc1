"""Whether a server serves yet."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable

_POLL_SECONDS = 0.1


class NotServing(Exception):
    """A server ended before it served, or takes too long; the message says which."""


def serves(url: str, timeout_seconds: float = 5.0) -> bool:
    """Whether a GET, by no proxy, is answered with 200."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout_seconds) as answer:
            return int(answer.status) == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def wait_until_serving(
    url: str,
    exit_code: Callable[[], int | None],
    deadline_seconds: float,
    on_poll: Callable[[float], None] = lambda _elapsed_seconds: None,
) -> float:
    """Seconds until the server whose exit code that is serves. Raises NotServing, and what ON_POLL raises."""
    started = time.monotonic()
    while not serves(url):
        elapsed = time.monotonic() - started
        if (code := exit_code()) is not None:
            raise NotServing(f"ended by itself, exit code {code}")
        if elapsed > deadline_seconds:
            raise NotServing(f"is not ready after {deadline_seconds:g} s")
        on_poll(elapsed)
        time.sleep(_POLL_SECONDS)
    # Whoever answers may be another, if this one could not have the port.
    if (code := exit_code()) is not None:
        raise NotServing(f"ended by itself, exit code {code}")
    return time.monotonic() - started
