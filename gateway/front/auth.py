"""Who is asking: API keys, compared by digest in constant time."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from gateway.config import KeyConfig
from gateway.errors import Unauthorized


class Keys:
    """The keys that clients may use; no keys = everybody may."""

    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._keys = [(key.digest, key) for key in keys]

    def check(self, headers: Mapping[bytes, bytes]) -> KeyConfig | None:
        """The key that a request came with; None where no key is needed. Raises Unauthorized.

        Every key is compared, whichever matches, so that the time taken tells nothing.
        """
        if not self._keys:
            return None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            token = headers.get(b"x-api-key", b"")
        if not token.strip():
            raise _unauthorized()
        digest = hashlib.sha256(token.strip()).digest()
        found = None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise _unauthorized()
        return found


def _unauthorized() -> Unauthorized:
    return Unauthorized("Incorrect or missing API key. Send it as `Authorization: Bearer <key>`.")
