"""TLS of a connection: between the transport of its socket and its protocol.

asyncio's own TLS shows a connection to its protocol only after the handshake, and keeps unread output in three buffers.
This transport shows it as soon as the client is accepted, so that one counter sees every socket. All unsent output is
in the socket's transport, so that its size and its limits count everything. It keeps at most one record of a peer's
bytes; uvloop's has a buffer of 256 KiB for each connection, and the same amount unread.
"""

import asyncio
import ssl
from contextlib import suppress
from errno import ECONNRESET
from typing import Any, cast

from gateway.core.turns import Intake

_RECORD_BYTES = 16384  # encrypted or decrypted per call: OpenSSL's buffers stay that small


class EncryptedTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """The transport of `protocol`, and the protocol of the socket's transport. `server_name`: at the client's end."""

    _raw: asyncio.Transport

    def __init__(
        self,
        protocol: asyncio.BufferedProtocol,
        context: ssl.SSLContext,
        handshake_seconds: float,
        *,
        loop: asyncio.AbstractEventLoop,
        server_name: str | None = None,
    ) -> None:
        self._protocol = protocol
        self._context = context
        self._handshake_seconds = handshake_seconds
        self._loop = loop
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        # Compiled code checks the types of results, and that of `SSLObject.read` is a number where there is a buffer.
        self._tls: Any = context.wrap_bio(self._received, self._to_send, server_name is None, server_name)
        self._intake = Intake()
        self._is_open = False  # the handshake has ended
        self._late: asyncio.TimerHandle | None = None
        self._shaken: asyncio.Future[None] = loop.create_future()  # it has ended, or the connection has
        self._error: OSError | None = None

    async def failure(self) -> OSError | None:
        """Wait for the end of the handshake: why it failed, if it did."""
        try:
            await self._shaken
        finally:
            if not self._is_open:
                self.abort()
        if not self._is_open:
            return self._error or ConnectionResetError(ECONNRESET, "closed in the handshake")
        return None

    # Called by the protocol.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_open or self._raw.is_closing():
            return
        rest, records = memoryview(data), list[bytes]()
        try:
            while rest:
                rest = rest[self._tls.write(rest[:_RECORD_BYTES]) :]
                records.append(self._to_send.read())
        except ssl.SSLError:  # the client broke the session
            self._raw.abort()
            return
        self._raw.writelines(records)

    def close(self) -> None:
        if self._is_open and not self._raw.is_closing():
            with suppress(ssl.SSLError):  # it does not wait for the client's answer
                self._tls.unwrap()
            self._flush()
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def is_reading(self) -> bool:
        return not self._intake.is_held

    def pause_reading(self) -> None:
        self._intake.hold()

    def resume_reading(self) -> None:
        self._intake.go_on()
        self._loop.call_soon(self._advance)  # received bytes may remain to be decrypted

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """That of the socket, with `sslcontext` and `ssl_object`."""
        own = {"sslcontext": self._context, "ssl_object": self._tls}
        return own[name] if name in own else self._raw.get_extra_info(name, default)

    # Called by the socket's transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._intake.begin(self._raw)
        self._late = self._loop.call_later(self._handshake_seconds, self._raw.abort)
        self._protocol.connection_made(self)
        self._advance()  # a client speaks first

    def connection_lost(self, error: Exception | None) -> None:
        self._end_handshake()
        self._intake.end()
        self._protocol.connection_lost(self._error or error)

    def eof_received(self) -> None:
        self.close()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return cast(memoryview, self._protocol.get_buffer(sizehint))[:_RECORD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes of the session have been read."""
        self._received.write(self.get_buffer(-1)[:nbytes])
        if nbytes == _RECORD_BYTES:
            self._intake.pause()  # more may come in one read, in hundreds of records
        self._advance()

    def _advance(self) -> None:
        """Continue the handshake, then decrypt the received bytes."""
        try:
            if not self._is_open:
                self._tls.do_handshake()
                self._is_open = True
                self._end_handshake()
            self._decrypt()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:  # no TLS, nothing in common, or not the right certificate
            self._error = error.with_traceback(None)
            self._flush()  # sends the peer the reason
            self._raw.close()
        else:
            self._flush()

    def _end_handshake(self) -> None:
        if self._late is not None:
            self._late.cancel()
        if not self._shaken.done():
            self._shaken.set_result(None)

    def _decrypt(self) -> None:
        """Pass on complete records. Raises SSLWantReadError at their end."""
        while (self._received.pending or self._tls.pending()) and not (self._intake.is_held or self._raw.is_closing()):
            room = cast(memoryview, self._protocol.get_buffer(-1))
            count = self._tls.read(len(room), room)
            if not count:
                self.close()  # the peer has said that it sends nothing more
                return
            self._protocol.buffer_updated(count)

    def _flush(self) -> None:
        """Send the session's own output, such as handshakes and alerts."""
        if self._to_send.pending and not self._raw.is_closing():
            self._raw.write(self._to_send.read())
