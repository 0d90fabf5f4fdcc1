"""Whether processes of a test still run; a worker that nobody waits for is gone a little after its group is killed."""

import time
from pathlib import Path

_DEADLINE_SECONDS = 120.0
_POLL_SECONDS = 0.01


def is_there(pid: int) -> bool:
    """Whether the process lives; one that was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_gone(pid: int) -> bool:
    """Whether it ends within the deadline."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while is_there(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
