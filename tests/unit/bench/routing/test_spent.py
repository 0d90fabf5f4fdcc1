"""What others use of the machine is told apart from what is ours."""

import os
import subprocess
import sys
import time

from tests.bench.routing.spent import Snapshot, between, snapshot

BUSY = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ninput()"


def test_ours_is_taken_off_and_the_rest_is_shared_over_all_cores() -> None:
    before = Snapshot(0.0, 10.0, {(1, 1): 0}, {(1, 1): 0, (2, 2): 0}, 2)
    after = Snapshot(10.0, 25.0, {(1, 1): 10**9}, {(1, 1): 10**9, (2, 2): 9 * 10**9}, 2)
    spent = between(before, after)
    assert spent.router_seconds == 1.0
    assert spent.others_share == (15 - 10) / 20


def test_a_process_that_computes_is_seen() -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        before = snapshot(os.getpid(), [child.pid])
        deadline = time.monotonic() + 10
        spent = between(before, snapshot(child.pid, []))
        while spent.router_seconds < 0.25 and time.monotonic() < deadline:
            spent = between(before, snapshot(child.pid, []))
        child.kill()
    assert 0.25 <= spent.router_seconds < 1
