"""Ends a process group when its owner's process ends in whatever way, be it killed."""

import subprocess

# Waits for the end of its input, which comes when its parent ends in whatever way, then kills the process group.
_COMMAND = ("/bin/sh", "-c", "cat > /dev/null; kill -s KILL -- -$1 2> /dev/null", "guard")


class Guard:
    """Watches from when it is made until it is dismissed. Raises OSError where it cannot start."""

    def __init__(self, group: int) -> None:
        self._process = subprocess.Popen([*_COMMAND, str(group)], stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        """End the watch; harmless when it has ended."""
        # Before its input ends: the group's id may belong to somebody else by now.
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
