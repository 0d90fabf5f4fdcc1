"""Whether something that speaks ZeroMQ answers at an endpoint, without taking part in it."""

import asyncio
import os
from contextlib import suppress

from gateway.kv_events.endpoints import Address, Source

_SIGNATURE_BYTES = 10  # 0xff, eight bytes of any value, 0x7f: each side of a ZMTP connection sends it at once


async def why_unreachable(source: Source, timeout_seconds: float) -> str | None:
    """Why a source's events or missed events cannot be read; None = they can, as far as can be seen."""
    endpoints = [] if source.bind else [source.endpoint]
    endpoints += [source.replay] if source.replay else []
    reasons = await asyncio.gather(*(_why_silent(endpoint, timeout_seconds) for endpoint in endpoints))
    return next((reason for reason in reasons if reason), None)


async def _why_silent(endpoint: str, timeout_seconds: float) -> str | None:
    address = Address.of(endpoint)
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                greeting = await reader.readexactly(_SIGNATURE_BYTES)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return f"{endpoint}: timed out"
    except asyncio.IncompleteReadError:
        return f"{endpoint} is not a ZeroMQ socket"
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return f"{endpoint}: {reason.lower()}"
    if greeting[0] != 0xFF or greeting[-1] != 0x7F:
        return f"{endpoint} is not a ZeroMQ socket"
    return None
