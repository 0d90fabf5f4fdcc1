"""The body of the request that a connection is receiving: its size, its framing, its pace, and what it holds."""

from gateway.config import ServerConfig
from gateway.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from gateway.memory import Holding

_MAX_FRAMING_BYTES = 131072  # besides as many bytes as the body has itself
_MAX_DRY_BYTES = 131072  # of framing or trailers in a row
_MANY_PIECES = 16


class Body:
    """One for each connection, started anew for each request.

    Its bytes are reserved in the connection's `holding` as they arrive. They stay reserved after `take`, for as long as
    the request is waiting or in progress.
    """

    __slots__ = (
        "_began_seconds", "_dry_bytes", "_holding", "_joined", "_kept_bytes", "_length", "_limit_bytes",
        "_looked_seconds", "_pieces", "_seen_bytes", "_window_bytes", "_window_seconds", "_wire_bytes", "size_bytes",
    )  # fmt: skip

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self.start(0, 0, 0.0)

    def start(self, limit_bytes: int, length: int, now: float) -> None:
        """A head is complete. `length`: as its Content-Length says; 0 if it has none."""
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._length = length
        self._pieces: list[bytes] = []
        self._joined: bytearray | None = (
            None  # instead of many pieces: an object for each small one takes 10 times more
        )
        self._kept_bytes = 0
        self._wire_bytes = self._dry_bytes = self._seen_bytes = 0
        self._began_seconds = self._looked_seconds = self._window_seconds = now
        self._window_bytes = 0

    @property
    def left_bytes(self) -> int:
        """How much is still to come of a body of known length."""
        return self._length - self.size_bytes

    def arrived(self, size_bytes: int) -> None:
        """Count bytes of the body. Raises BodyTooLarge."""
        self.size_bytes += size_bytes
        if self.size_bytes > self._limit_bytes:
            raise too_large(self._limit_bytes)

    def keep(self, data: bytes) -> None:
        """Keep bytes of the body. Raises MemoryFull."""
        self._holding.add(len(data))
        self._kept_bytes += len(data)
        if self._joined is not None:
            self._joined += data
            return
        self._pieces.append(data)
        if len(self._pieces) > _MANY_PIECES:
            self._joined = bytearray().join(self._pieces)
            self._pieces.clear()

    def framed(self, wire_bytes: int) -> None:
        """Count what arrived of the body with its framing. Raises InvalidRequest if that is mostly framing."""
        self._wire_bytes += wire_bytes
        self._dry_bytes = self._dry_bytes + wire_bytes if self._seen_bytes == self.size_bytes else 0
        self._seen_bytes = self.size_bytes
        if self._wire_bytes > _MAX_FRAMING_BYTES + 2 * self.size_bytes or self._dry_bytes > _MAX_DRY_BYTES:
            raise InvalidRequest(
                "Too much chunked-encoding overhead in the request body: send larger chunks without extensions."
            )

    def take(self) -> bytes:
        """The whole body."""
        pieces = self._pieces
        body = bytes(self._joined) if self._joined is not None else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._clear()
        return body

    def drop(self) -> None:
        """Discard what has been kept: the request is refused."""
        self._holding.shrink(self._kept_bytes)
        self._clear()

    def _clear(self) -> None:
        self._pieces.clear()
        self._joined = None
        self._kept_bytes = 0

    def look(self, now: float, config: ServerConfig, *, held_back: bool) -> None:
        """Judge the client's pace. Called about once a second; `held_back`: nothing was read since the last time.

        Raises RequestTimeout.
        """
        if held_back:
            passed = now - self._looked_seconds
            self._began_seconds += passed
            self._window_seconds += passed
        self._looked_seconds = now
        if now - self._began_seconds > config.body_timeout_seconds:
            raise RequestTimeout(f"Timeout: the request body took over {config.body_timeout_seconds:g} s to arrive.")
        window = now - self._window_seconds
        if window > config.body_grace_seconds:
            if self.size_bytes - self._window_bytes < window * config.body_min_bytes_per_second:
                raise RequestTimeout(
                    f"The request body was too slow: under {config.body_min_bytes_per_second:g} bytes/s for"
                    f" {window:.0f} s."
                )
            self._window_seconds, self._window_bytes = now, self.size_bytes


def too_large(limit_bytes: int) -> BodyTooLarge:
    """The error for a body over the limit of its route; 0 = the route takes none."""
    if not limit_bytes:
        return BodyTooLarge("This URL accepts no request body: send the request without one.")
    return BodyTooLarge(f"The request body exceeds the limit of {limit_bytes} bytes.")
