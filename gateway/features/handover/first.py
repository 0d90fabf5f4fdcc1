"""Process 1 of a container, which ends with it: it starts the gateway, and outlives each process that is replaced.

The processes of the gateway are one process group. Signals go to all of it, and its end is the end of this process.
"""

import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Final

_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_OTHERS: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_KILLED: Final = 128  # added to the number of a signal, as shells do


class Group:
    """The processes of one gateway. Signals to end that come before there are any are passed on at the start."""

    def __init__(self) -> None:
        self._number = 0
        self._early: list[int] = []

    def start(self, command: list[str]) -> None:
        """Start the first one. Raises OSError."""
        for number in _ENDING:
            signal.signal(number, self._pass_on)
        for number in _OTHERS:
            signal.signal(number, signal.SIG_IGN)  # inherited: the new process ignores them until it has handlers
        self._first = subprocess.Popen(command, process_group=0)
        self._number = self._first.pid
        for number in _OTHERS:
            signal.signal(number, self._pass_on)
        for each in self._early:
            self._send(each)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if self._number:
            self._send(number)
        else:
            self._early.append(number)

    def _send(self, number: int) -> bool:
        """Whether there is a process left; 0 = only ask."""
        try:
            os.killpg(self._number, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> int:
        """Reap all that end here, until the group has ended; returns the exit code of the last process."""
        code = 0
        while self._send(0):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            is_own = os.getpgid(ended.si_pid) == self._number
            _, status = os.waitpid(ended.si_pid, 0)
            if is_own:
                code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else _KILLED - code


def run_as_first() -> int:
    """Run this command in a process of its own until it and all that replace it have ended. Raises OSError."""
    group = Group()
    group.start(sys.orig_argv)
    return group.wait()
