"""What differs between tests of the gateway's Python and of its compiled build; ports for tests side by side."""

import gc
import os
import re
from collections.abc import Iterator

import pytest

from gateway import BUILD
from loadtest.servers.processes import CHOSEN_PORTS

# Compiled code takes no stand-in for a compiled class, and a compiled class or object takes no other attributes.
_STAND_IN = re.compile(
    r"(object expected; got (tests\.|function|types\.SimpleNamespace)"
    r"|attribute '\w+' is read-only"
    r"|cannot set '\w+' attribute of immutable type"
    r"|interpreted classes cannot inherit from compiled)"
)


# These have stand-ins for compiled classes throughout or in tasks of their own, or copy compiled objects.
_WITH_STAND_INS = [
    "unit/embeddings/test_fair_queue.py",
    "unit/embeddings/test_pending_batch.py",
    "unit/scheduling/test_queue_scan*.py",
    "unit/scheduling/test_scheduler_further.py",
]
collect_ignore_glob = _WITH_STAND_INS if BUILD == "compiled" else []


def pytest_configure() -> None:
    """Files that run side by side choose their ports from ranges of their own: two would choose the same one else."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker:
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        size = len(CHOSEN_PORTS) // workers
        first = CHOSEN_PORTS[int(worker) % workers * size]  # one that replaces another has a higher number
        os.environ["LOADTEST_PORTS"] = f"{first}-{first + size - 1}"


def pytest_collection_finish() -> None:
    """Keep the tests themselves out of collections of garbage: each of these would look through all of them."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"gateway: {BUILD}"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """On the compiled build, a test that needs a stand-in for a compiled class is skipped; it runs on the other."""
    try:
        return (yield)
    except (TypeError, AttributeError) as error:
        if BUILD == "compiled" and _STAND_IN.search(str(error)):
            pytest.skip(f"needs a stand-in for a compiled class: {error}")
        raise
