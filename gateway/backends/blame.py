"""Whether a backend's error answers are the fault of the backend, or of one tenant's requests. Pure."""

import math
from typing import NamedTuple

_LATELY_SECONDS = 30.0
_NEVER = -math.inf


class Peers(NamedTuple):
    """When the other backends of the same models last served a request, and when one last gave an error answer."""

    served_seconds: float
    erred_seconds: float


class Blame:
    """A backend's error answers (5xx) since the last request that it served.

    A connection that fails is the backend's fault. An error answer may be the request's: a tenant that sends what no
    engine can digest must not cost others their backends. So error answers count as failures of the backend

    - all of them, once they went to two tenants;
    - while all went to one tenant (without keys or a tenant header, all clients are one): only if the backend has
      served no other tenant lately, and another backend has served somebody lately. Then they count at once if no
      other backend has given an error answer lately, else once they have gone on for `patience_seconds`.

    *Lately* is within 30 seconds. A request of unknown tenant (a batch with inputs of several) is taken for one of
    the tenant whose requests fail.
    """

    __slots__ = ("_count", "_last", "_others_seconds", "_several", "_since_seconds", "_tenant", "erred_seconds",
                 "served_seconds")  # fmt: skip

    def __init__(self) -> None:
        self.served_seconds = _NEVER  # when a request was last served
        self.erred_seconds = _NEVER  # when an error answer was last given
        self._last: str | None = None  # tenant that was served
        self._others_seconds = _NEVER  # when another tenant than this was last served
        self.forgive()

    def forgive(self) -> None:
        """Begin anew: the backend works, is ejected, or is another one."""
        self._count = 0
        self._since_seconds = 0.0
        self._tenant: str | None = None
        self._several = False

    def served(self, tenant: str | None, now: float) -> None:
        """The backend served a request."""
        if self._count:
            self.forgive()
        if tenant != self._last:
            self._last, self._others_seconds = tenant, self.served_seconds
        self.served_seconds = now

    def erred(self, tenant: str | None, now: float) -> None:
        """The backend gave an error answer."""
        if not self._count:
            self._since_seconds = now
        self._count += 1
        self.erred_seconds = now
        if self._tenant is None:
            self._tenant = tenant
        elif tenant is not None and tenant != self._tenant:
            self._several = True

    def failures(self, peers: Peers, patience_seconds: float, now: float) -> int:
        """Error answers that count as failures of the backend."""
        if self._several:
            return self._count
        others_seconds = self._others_seconds if self._tenant == self._last else self.served_seconds
        if now - others_seconds <= _LATELY_SECONDS or now - peers.served_seconds > _LATELY_SECONDS:
            return 0
        stands_out = now - peers.erred_seconds > _LATELY_SECONDS
        return self._count if stands_out or now - self._since_seconds >= patience_seconds else 0
