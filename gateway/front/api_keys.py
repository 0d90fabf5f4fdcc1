"""API keys of clients: the key of a request, found by its digest. Pure."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

from gateway.config.keys import KeyConfig
from gateway.errors import KeyExpired, Unauthorized


class ApiKeys:
    """The keys of all clients, by digest.

    A plain look-up is safe against timing attacks: digests are compared only where their hashes, which Python seeds at
    random, are equal, and a client cannot change a digest step by step, since it is SHA-256 of what was sent.
    """

    def __init__(self, keys: Sequence[KeyConfig], unix_seconds: Callable[[], float]) -> None:
        self._unix_seconds = unix_seconds
        self._by_digest: dict[bytes, KeyConfig] = {}
        self._expiry: dict[bytes, float] = {}  # by digest; empty = no key expires, and none is asked whether it has
        for key in keys:
            for digest, until in key.digests.items():
                self._by_digest[digest] = key
                if until is not None:
                    self._expiry[digest] = until

    def check(self, headers: Mapping[bytes, bytes]) -> KeyConfig:
        """The API key of a request with these headers. Raises Unauthorized or KeyExpired."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            token = headers.get(b"x-api-key", b"")
        token = token.strip()
        digest = hashlib.sha256(token).digest()
        key = self._by_digest.get(digest)
        if key is None or not token:
            raise Unauthorized("Incorrect or missing API key. Send it as `Authorization: Bearer <key>`.")
        if self._expiry:
            until = self._expiry.get(digest)
            if until is not None and self._unix_seconds() >= until:
                raise KeyExpired("The API key has expired. Ask the operator of this server for a new one.")
        return key
