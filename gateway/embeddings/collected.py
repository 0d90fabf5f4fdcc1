"""Where the answer to a batch goes: into memory, to be shared out."""

from collections.abc import Callable


class Collected:
    """Keeps one whole answer."""

    blocked = False

    def __init__(self) -> None:
        self.begun = False
        self.on_room: Callable[[], None] | None = None
        self.extra = b""  # header lines for a client, of whom there are many here
        self.status = 0
        self.content_type = b""
        self.headers = b""
        self._pieces: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Collected {self.status}, {sum(map(len, self._pieces))} bytes>"

    @property
    def body(self) -> bytes:
        """What came."""
        return b"".join(self._pieces)

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        """A whole answer at once."""
        self.begin(status, content_type, extra)
        self._pieces.append(body)

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        """The head of an answer whose length is not known."""
        self.begun = True
        self.status, self.content_type, self.headers = status, content_type, extra

    def comment(self) -> None:
        """Nobody waits for signs of life here."""

    def write(self, data: bytes) -> bool:
        """Body bytes. There is always room: batches are bounded."""
        self._pieces.append(data)
        return False

    def end(self) -> None:
        """The body is complete."""
