"""Salted hashes of prompts' prefix blocks, for the access log: which prompts begin alike, and nothing else of them."""

from hashlib import blake2b, sha256
from typing import Any

from gateway.request import Ask

_HASH_BYTES = 8


class PrefixHashes:
    """Hashes with one salt. Without its secret nobody can tell whether a prompt that they guess was among them."""

    def __init__(self, secret: bytes) -> None:
        key = sha256(b"access log\0" + secret).digest()  # the same secret makes other salts too
        self._salted = blake2b(key=key, digest_size=_HASH_BYTES)

    def of(self, ask: Ask) -> dict[str, Any]:
        """The prompt's size in bytes, where its blocks end, and the hash of all that is before each end."""
        return {"bytes": ask.prompt_size, "ends": ask.edges, "hashes": [self._hash(key) for key in ask.keys]}

    def _hash(self, key: int) -> str:
        hashed = self._salted.copy()  # half the cost of salting it again
        hashed.update(key.to_bytes(8, "little"))
        return hashed.hexdigest()
