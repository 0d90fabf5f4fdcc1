"""A guard kills when its owner is gone, and only then."""

import subprocess
import sys

from loadtest.servers.processes import Guard

OWNER = """
import subprocess, sys, time
from loadtest.servers.processes import Guard
process = subprocess.Popen(["sleep", "300"], start_new_session=True)
guard = Guard(process.pid)
print("guarded", flush=True)
time.sleep(300)
"""
DEADLINE_SECONDS = 20.0


def test_a_guarded_process_does_not_outlive_an_owner_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        owner.kill()
        assert owner.stdout.read() == b""  # ends when the guarded process, which holds it too, is gone


def test_a_guard_that_is_dismissed_leaves_the_process_alone() -> None:
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as process:
        guard = Guard(process.pid)
        guard.dismiss()
        guard.dismiss()
        assert process.poll() is None
        process.kill()
        assert process.wait(DEADLINE_SECONDS) == -9
