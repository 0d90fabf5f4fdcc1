"""The health of one backend: probes with hysteresis, ejection by failed requests. Pure.

Two kinds of evidence are kept apart. Probes of /health give a verdict, which changes after `fall` bad or `rise` good
ones in a row. Requests give consecutive failures, which eject for a time that doubles at each relapse. A backend is
down if the probes say so, else ejected or not.

- Response bytes within the last `fall` probe intervals overrule probes that time out: a busy engine answers /health
  late. They never overrule a refused connection or a response that reports an unhealthy engine.
- Other backends are preferred as soon as one probe times out while no response bytes come: the engine may hang.
- The first good probe ever is enough: hysteresis protects a running backend, not a starting one.
- An ejection ends by time, or by a good probe in its second half. If the engine reported that it is dead, only time
  counts: its /health may still return 200.
- After an ejection the backend is on probation: one failure ejects it again, one success ends the probation.
- Which error answers count as failures is decided by `Blame`. A request without output in time counts only if no other
  request got any meanwhile.
"""

import enum
import errno
import math
from collections.abc import Sequence
from random import Random
from typing import Literal, NamedTuple

from gateway.config import HealthConfig

State = Literal["unknown", "up", "down", "ejected"]
JITTER = 0.1  # so that several gateways do not return to a backend at the same moment
MOST_DOUBLINGS = 16
UNREACHABLE_ERRNOS = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})  # why a connection failed
_LATELY_SECONDS = 30.0
_NEVER = -math.inf


class Blame:
    """A backend's error answers (5xx) since its last successful request.

    A failed connection is the backend's fault. An error answer may be the request's: a tenant whose requests break
    every engine must not eject the backends of others. So error answers count as failures of the backend

    - all of them, once they went to two tenants;
    - while all went to one tenant (without keys or a tenant header, all clients are one): only if the backend has
      served no other tenant lately, and another backend has served any tenant lately. Then they count immediately if no
      other backend has given an error answer lately, else after `patience_seconds`.

    *Lately* is within 30 seconds. A request of unknown tenant (a batch with inputs of several) counts for the tenant
    whose requests fail.
    """

    def __init__(self) -> None:
        self.served_seconds = _NEVER  # when a request was last served
        self.erred_seconds = _NEVER  # when an error answer was last given
        self._last: str | None = None  # tenant that was served
        self._others_seconds = _NEVER  # when another tenant than this was last served
        self.forgive()

    def forgive(self) -> None:
        """Reset: the backend works, is ejected, or was restarted."""
        self._count = 0
        self._since_seconds = 0.0
        self._tenant: str | None = None
        self._several = False

    def served(self, tenant: str | None, now: float) -> None:
        if self._count:
            self.forgive()
        if tenant != self._last:
            self._last, self._others_seconds = tenant, self.served_seconds
        self.served_seconds = now

    def erred(self, tenant: str | None, now: float) -> None:
        if not self._count:
            self._since_seconds = now
        self._count += 1
        self.erred_seconds = now
        if self._tenant is None:
            self._tenant = tenant
        elif tenant is not None and tenant != self._tenant:
            self._several = True

    def failures(self, peers: Sequence["Blame"], patience_seconds: float, now: float) -> int:
        """Error answers that count as failures; `peers`: of the other backends of the same models."""
        if self._several:
            return self._count
        others_seconds = self._others_seconds if self._tenant == self._last else self.served_seconds
        peers_serve = any(now - peer.served_seconds <= _LATELY_SECONDS for peer in peers)
        if now - others_seconds <= _LATELY_SECONDS or not peers_serve:
            return 0
        stands_out = all(now - peer.erred_seconds > _LATELY_SECONDS for peer in peers)
        return self._count if stands_out or now - self._since_seconds >= patience_seconds else 0


class ProbeResult(enum.Enum):
    """The result of one probe of /health."""

    OK = "ok"
    TIMEOUT = "timeout"  # no answer in time
    BROKEN = "broken"  # the connection broke, or the answer is not HTTP
    DNS = "dns"  # the host name has no address
    TLS = "tls"  # the certificate is not trusted, or the server does not speak TLS
    UNWELL = "unwell"  # answered 5xx
    REFUSED = "refused"  # nothing listens there
    UNSENT = "unsent"  # the gateway has no file descriptor left: ignored

    @property
    def is_silent(self) -> bool:
        """Whether nothing answered, which says nothing about the backend's process."""
        return self in (ProbeResult.TIMEOUT, ProbeResult.BROKEN, ProbeResult.DNS, ProbeResult.TLS)


class HealthView(NamedTuple):
    """The part of a backend's health that decides where requests go."""

    state: State
    gone: bool
    late: bool
    ever_up: bool
    ejected_until: float  # decides which ejections are not carried out


class Health:
    """The state of one backend. `now` is a monotonic time in seconds, never decreasing."""

    def __init__(self, config: HealthConfig, random: Random) -> None:
        self._random = random
        self.apply(config)
        self.state: State = "unknown"
        self.probe_result: ProbeResult | None = None  # of the last probe
        self.probe_error: str | None = None  # why it did not succeed
        self.late = False  # the last probe timed out, and no response bytes arrived meanwhile
        self.refused = False  # the last attempt to reach it was refused
        self._refused_before = False  # one was, since the last probe that got through
        self.ever_up = False
        self.heard_at = _NEVER  # time of the last response bytes
        self.progressed_at = _NEVER  # time of the last output
        self.ejected_until = -math.inf
        self.ejections = 0  # so far
        self.blame = Blame()
        self._verdict: Literal["unknown", "up", "down"] = "unknown"
        self._falls = self._rises = 0  # bad and good probes in a row
        self._failures = self._doublings = 0  # failed requests in a row; ejections of late
        self._unwell = self._is_ejected = self._fatal = self._on_probation = False
        self._ejected_at = self._returned_at = -math.inf

    def apply(self, config: HealthConfig) -> None:
        """Take over other settings. An ejection ends when it was to end."""
        self._config = config
        self._grace_seconds = config.probe_interval_seconds * config.fall

    @property
    def gone(self) -> bool:
        """Certainly unable to serve: it refuses connections, or probes and requests agree on a dead engine."""
        return self.refused or (self._unwell and self._is_ejected and self._fatal)

    @property
    def view(self) -> HealthView:
        return HealthView(self.state, self.gone, self.late, ever_up=self.ever_up, ejected_until=self.ejected_until)

    def probed(self, probe: ProbeResult, now: float, reason: str = "") -> bool:
        """Count a probe. Whether it got through after refused connections, so that another process may answer."""
        self.tick(now)
        self.probe_result, self.probe_error = probe, reason or None
        may_be_another = self._refused_before and probe is not ProbeResult.REFUSED
        self.refused = self._refused_before = probe is ProbeResult.REFUSED
        self._unwell = probe is ProbeResult.UNWELL
        self.late = probe.is_silent and now - self.heard_at >= self._config.probe_timeout_seconds
        if probe is ProbeResult.OK:
            self._probed_well(now)
        else:
            self._rises = 0
            self._falls += 1
            is_busy = probe.is_silent and now - self.heard_at < self._grace_seconds
            if self._verdict == "unknown" or (self._falls >= self._config.fall and not is_busy):
                self._verdict = "down"
        self._settle()
        if may_be_another:
            self.restarted()
        return may_be_another

    def heard(self, now: float, *, is_output: bool) -> None:
        """Response bytes arrived; `is_output`: not only a head, or the structure before a first token."""
        self.heard_at = now
        if is_output:
            self.progressed_at = now

    def succeeded(self, now: float, tenant: str | None = None) -> None:
        self.blame.served(tenant, now)
        self.heard_at = self.progressed_at = now
        self.refused = self.late = False
        self._failures = 0
        self._on_probation = False

    def failed(self, now: float, *, fatal: bool = False, refused: bool = False) -> None:
        """Count a request that the backend failed. `fatal`: its engine is dead, so eject immediately."""
        self.tick(now)
        self.refused = refused
        self._refused_before |= refused
        if self._is_ejected:
            self._fatal = self._fatal or fatal  # failures of requests from before the ejection do not prolong it
            return
        self._failures += 1
        if fatal or self._on_probation or self._failures >= self._config.eject_failures:
            self._eject(now, fatal)

    def erred(self, now: float, tenant: str | None, peers: Sequence[Blame]) -> None:
        """Count an error answer to a request of this tenant (None = not known)."""
        self.tick(now)
        self.refused = False
        if self._is_ejected:
            return
        self.blame.erred(tenant, now)
        failures = self.blame.failures(peers, self._grace_seconds, now)
        if failures and (self._on_probation or self._failures + failures >= self._config.eject_failures):
            self._eject(now, fatal=False)

    def tick(self, now: float) -> None:
        """End an ejection whose time is over."""
        if self._is_ejected and now >= self.ejected_until:
            self._return(now)

    def restarted(self) -> None:
        """Another process answers there: forget the failures of the old one."""
        self._is_ejected = self._fatal = self._on_probation = False
        self._failures = self._doublings = 0
        self.blame.forgive()
        self.ejected_until = -math.inf
        self._settle()

    def _probed_well(self, now: float) -> None:
        self._falls = 0
        if self._verdict != "up":
            self._rises += 1
            if not self.ever_up or self._rises >= self._config.rise:
                self._verdict = "up"
                self._rises = 0
        half_time = (self._ejected_at + self.ejected_until) / 2
        if self._is_ejected and not self._fatal and now >= half_time:
            self._return(now)

    def _eject(self, now: float, fatal: bool) -> None:
        if not self._on_probation:  # it has worked since the last ejection: one doubling less for each quiet period
            quiet_seconds = now - max(self._returned_at, self._ejected_at)
            forgotten = quiet_seconds / self._config.eject_max_seconds
            self._doublings = 0 if forgotten >= self._doublings else self._doublings - int(forgotten)
        seconds = min(self._config.eject_base_seconds * 2**self._doublings, self._config.eject_max_seconds)
        self._is_ejected = True
        self.ejections += 1
        self._fatal = fatal
        self._ejected_at = now
        self.ejected_until = now + seconds * self._random.uniform(1 - JITTER, 1 + JITTER)
        self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)
        self._failures = 0
        self.blame.forgive()
        self._settle()

    def _return(self, now: float) -> None:
        self._is_ejected = self._fatal = False
        self._on_probation = True
        self._returned_at = now
        self.ejected_until = -math.inf
        self._settle()

    def _settle(self) -> None:
        self.state = "ejected" if self._is_ejected and self._verdict != "down" else self._verdict
        self.ever_up = self.ever_up or self.state == "up"
