"""Names for requests that the client did not name."""

import secrets
from collections.abc import Iterator

_BYTES = 12
_AT_ONCE = 256


def request_ids() -> Iterator[str]:
    """Random names: none tells anything of another. The kernel is asked once for many, because each call costs."""
    while True:
        block = secrets.token_hex(_BYTES * _AT_ONCE)
        for start in range(0, len(block), 2 * _BYTES):
            yield block[start : start + 2 * _BYTES]
