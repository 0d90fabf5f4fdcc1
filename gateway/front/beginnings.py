"""Which answers begin in one turn of the event loop: few, so that streams get their turn before the next ones.

Requests that arrive together are read and placed when their answers begin. All of them at once would stop the event
loop, and with it every stream, for as long as that takes.
"""

from collections import deque
from typing import Protocol

AT_ONCE = 32


class Beginner(Protocol):
    """A connection whose next answer is due."""

    def proceed(self) -> None:
        """Ask again whether the answer may begin."""


class Beginnings:
    """Counts the answers that begin, and puts off those that are due beyond `AT_ONCE`."""

    def __init__(self) -> None:
        self._beginning = 0
        self._put_off: deque[Beginner] = deque()

    def may_begin(self, connection: Beginner) -> bool:
        """Whether its next answer may begin now; if not, its `proceed` is called, in order, when others have begun."""
        if self._beginning < AT_ONCE:
            self._beginning += 1
            return True
        self._put_off.append(connection)
        return False

    def begun(self) -> None:
        """An answer that might begin has done so, or never will.

        Those that were put off ask again, in order.
        """
        self._beginning -= 1
        while self._put_off and self._beginning < AT_ONCE:
            self._put_off.popleft().proceed()
