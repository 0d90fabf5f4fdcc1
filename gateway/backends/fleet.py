"""The fleet: the one owner of the backends' state, and of which backend may serve which model now.

Reads are lookups in a snapshot that is replaced whenever evidence changes it. Evidence comes from the relay (requests)
and from the probe (/health, /v1/models, /metrics).
"""

import math
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from gateway.backends.backend import Backend
from gateway.backends.concurrency_limit import EngineSample, LimitChange, Limiter
from gateway.backends.facts import Facts, ModelCard, Telemetry
from gateway.backends.health import PROBE_WORDS, UNREACHABLE_ERRNOS, Peers, ProbeResult, State
from gateway.config import AdmissionConfig, BackendConfig, HealthConfig
from gateway.errors import BackendError, ConnectFailed, EngineDead
from gateway.routing.engine import Engine
from gateway.supervisor import Supervisor

Clock = Callable[[], float]


def eligible(backends: Sequence[Backend], max_ejected: float) -> tuple[Backend, ...]:
    """The backends of a model that may get requests; never those that are certainly gone.

    Ejections beyond the share `max_ejected` are not carried out; those that end first are spared first.
    If no backend is left, all that are not gone are used: probes alone must not stop the traffic.
    """
    usable = {backend for backend in backends if backend.health.state == "up" and not backend.health.gone}
    ejected = [backend for backend in backends if backend.health.state == "ejected"]
    too_many = max(0, len(ejected) - int(len(backends) * max_ejected))
    sparable = [backend for backend in ejected if not backend.health.gone]
    sparable.sort(key=lambda backend: backend.health.ejected_until)
    usable.update(sparable[:too_many])
    if usable:
        return tuple(backend for backend in backends if backend in usable)
    return tuple(backend for backend in backends if not backend.health.gone)


class Fleet:
    """All backends. Synchronous methods only, called from one event loop."""

    def __init__(
        self,
        backends: Sequence[BackendConfig],
        health: HealthConfig,
        admission: AdmissionConfig | None = None,
        *,
        clock: Clock,
        random: Random,
        supervisor: Supervisor | None = None,
    ) -> None:
        admission = admission or AdmissionConfig()
        self.backends = tuple(
            Backend(index, config, health, random, _limiter(admission)) for index, config in enumerate(backends)
        )
        self.on_change: list[Callable[[], None]] = []
        self.on_restart: list[Callable[[Backend], None]] = []
        self.on_probe_wanted: list[Callable[[Backend], None]] = []  # this backend should be probed soon
        self.on_limit: list[Callable[[Backend, LimitChange], None]] = []  # its adaptive limit changed
        self.ready = False
        self._health = health
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock)
        self._serving: dict[str, tuple[Backend, ...]] = {}
        self._families: dict[str, str] = {}
        self._numbers = count(len(self.backends))  # of engines beyond the first of each backend
        self._missing: set[tuple[Backend, str]] = set()  # reported as missing since its list was read
        self._refused: set[Backend] = set()  # refused a connection since the last probe that got through
        self._by_name = {backend.name: backend for backend in self.backends}
        self._resize_engines()

    def serving(self, model: str) -> tuple[Backend, ...] | None:
        """The backends that may be given a request for this model now; None = no backend ever listed it."""
        return self._serving.get(model)

    def candidates(self, model: str) -> list[Engine] | None:
        """The engines of these; None if no backend can have the model (one whose models are unknown yet may)."""
        if serving := self._serving.get(model):
            return [engine for backend in serving for engine in backend.engines]
        may_come = any(backend.lists(model) or not backend.facts.models for backend in self.backends)
        return [] if may_come else None

    def backend(self, name: str) -> Backend | None:
        return self._by_name.get(name)

    def engines(self) -> list[Engine]:
        """Every engine that a backend runs now."""
        return [engine for backend in self.backends for engine in backend.engines]

    def engine(self, index: int) -> Engine | None:
        """The engine with this number; None if its backend does not run it now."""
        return self._engines.get(index)

    def family(self, model: str) -> str:
        """The model whose engines a model runs on: itself, an adapter's base, or the first of its names."""
        return self._families.get(model, model)

    def families(self) -> list[str]:
        """The families of all models, without repetition."""
        return list(dict.fromkeys(self._families.values()))

    def recovery_seconds(self) -> float:
        """Expected time until a backend is back: the end of an ejection, or enough good probes."""
        now = self._clock()
        probes = self._health.rise * self._health.probe_interval_seconds
        waits = [b.health.ejected_until - now if b.health.state == "ejected" else probes for b in self.backends]
        return max(0.5, min(waits))

    def models(self) -> tuple[ModelCard, ...]:
        """The models that backends last listed; of several cards for one, that with the shortest context."""
        cards: dict[str, ModelCard] = {}
        for backend in self.backends:
            for card in backend.facts.models:
                known = cards.setdefault(card.id, card)
                if (card.max_model_len or math.inf) < (known.max_model_len or math.inf):
                    cards[card.id] = card
        return tuple(cards.values())

    def adapter(self, model: str) -> str | None:
        """The model's name, if it is a LoRA adapter of another."""
        cards = [card for backend in self._serving.get(model, ()) for card in backend.facts.models if card.id == model]
        return model if any(card.parent for card in cards) else None

    def succeeded(self, backend: Backend, tenant: str | None = None) -> None:
        """A request was answered; `tenant`: whose it was, if that is known."""
        health = backend.health
        gone = health.gone
        health.succeeded(self._clock(), tenant)
        if health.gone != gone:
            self._rebuild()

    def failed(self, backend: Backend, error: BackendError, tenant: str | None = None) -> None:
        """A request failed. Errors that are not the backend's fault are not counted; `tenant` as in `succeeded`."""
        if not error.counts_as_failure:
            return
        refused = isinstance(error, ConnectFailed) and _was_refused(error.__cause__)
        if refused:
            self._refused.add(backend)
        before = _view(backend)
        if error.answered:
            backend.health.erred(self._clock(), tenant, self._peers(backend))
        else:
            backend.health.failed(self._clock(), fatal=isinstance(error, EngineDead), refused=refused)
        self._judged(backend, before)
        after = _view(backend)
        if (after.state, after.gone) != (before.state, before.gone):
            self._notify("backend_doubt", self.on_probe_wanted, backend)

    def _peers(self, backend: Backend) -> Peers:
        """Recent results of the other backends of the same models."""
        models = {card.id for card in backend.facts.models}
        peers = [
            other.health.blame
            for other in self.backends
            if other is not backend and any(card.id in models for card in other.facts.models)
        ]
        return Peers(
            max((peer.served_seconds for peer in peers), default=-math.inf),
            max((peer.erred_seconds for peer in peers), default=-math.inf),
        )

    def model_missing(self, backend: Backend, model: str) -> None:
        """A backend reported a listed model as missing: others are used until it lists its models again."""
        if backend.lists(model):
            self._missing.add((backend, model))
            self._rebuild()
            self._notify("backend_doubt", self.on_probe_wanted, backend)

    def list_read(self, backend: Backend) -> None:
        """The backend has listed its models again (`learned` gets the list)."""
        if any(missing[0] is backend for missing in self._missing):
            self._missing = {missing for missing in self._missing if missing[0] is not backend}
            self._rebuild()

    def probed(self, backend: Backend, probe: ProbeResult, reason: str = "") -> None:
        """A probe of /health ended; `reason`: why there was no answer."""
        before = _view(backend)
        backend.probed(None if probe is ProbeResult.OK else reason or PROBE_WORDS[probe])
        backend.health.probed(probe, self._clock())
        if probe is ProbeResult.REFUSED:
            self._refused.add(backend)
        elif backend in self._refused:
            self._refused.remove(backend)
            backend.health.restarted()
            # If the process's start is known, the next scrape shows whether it is another process.
            if before.ever_up and backend.facts.process_start_seconds is None:
                self._restarted(backend)
        self._judged(backend, before)

    def learned(self, backend: Backend, facts: Facts) -> None:
        """Take over facts that the backend reports of itself."""
        old, sizes = backend.facts, _sizes(backend)
        if facts == old:
            return
        backend.learn(facts)
        if _differ(old.process_start_seconds, facts.process_start_seconds) or _differ(old.version, facts.version):
            backend.health.restarted()
            self._restarted(backend)
        else:
            self._rebuild(must_notify=sizes != _sizes(backend))

    def measured(self, backend: Backend, telemetry: Telemetry | None) -> None:
        """The backend's load was read; None = what was known is too old to be used."""
        old = backend.telemetry
        backend.measured(telemetry)
        knows_start = backend.facts.process_start_seconds is not None
        if old and telemetry and not knows_start and telemetry.prefix_queries_tokens < old.prefix_queries_tokens:
            self._restarted(backend)  # a counter went back to zero
        elif telemetry is None:
            backend.limiter.lost()
        elif change := backend.limiter.observe(self._sample(backend, telemetry)):
            self._limit_changed(backend, change)

    def tick(self, backend: Backend) -> None:
        """Time has passed: end an ejection that is over, and pass on the limit of a slow start."""
        now = self._clock()
        before = _view(backend)
        backend.health.tick(now)
        self._judged(backend, before)
        since = backend.slow_since_seconds
        if since is not None:
            if now - since >= backend.slow_start_seconds:
                backend.end_slow_start()
            self._changed()

    def _sample(self, backend: Backend, telemetry: Telemetry) -> EngineSample:
        capacity = telemetry.waiting_for_capacity
        return EngineSample(
            telemetry.at_seconds,
            running=telemetry.running,
            waiting=telemetry.waiting if capacity is None else capacity,
            preemptions=telemetry.preemptions,
            kv_usage=telemetry.kv_usage,
            in_flight=backend.in_flight,
            sent=backend.placed,
            generation_tokens=telemetry.generation_tokens,
        )

    def _judged(self, backend: Backend, before: "_View") -> None:
        after = _view(backend)
        if after == before:
            return
        if after.state == "up" and before.state in ("down", "ejected") and before.ever_up:
            backend.start_slowly(self._clock())
        self._rebuild()

    def _restarted(self, backend: Backend) -> None:
        backend.measured(None)
        if change := backend.limiter.restarted(self._clock()):
            self._limit_changed(backend, change)
        backend.start_slowly(self._clock())
        self._notify("backend_restart", self.on_restart, backend)  # before on_change, which may place requests
        self._rebuild(must_notify=True)

    def _rebuild(self, must_notify: bool = False) -> None:
        listing: dict[str, list[Backend]] = {model: [] for model in self._serving}
        for backend in self.backends:
            for card in backend.facts.models:
                listing.setdefault(card.id, []).append(backend)
        for model in {model for _, model in self._missing}:
            listed = listing.get(model, [])
            listing[model] = [backend for backend in listed if (backend, model) not in self._missing] or listed
        self._families = _families(self.backends)
        serving = {model: eligible(backends, self._health.max_ejected) for model, backends in listing.items()}
        for alone in serving.values():
            if all(backend.slow_since_seconds is not None for backend in alone):
                for backend in alone:  # no other could take what they are spared
                    backend.end_slow_start()
        if serving != self._serving:
            self._serving = serving
            self.ready = any(serving.values())
            must_notify = True
        if must_notify:
            self._changed()

    def _resize_engines(self) -> None:
        """Update the engines from their backends' facts and limits."""
        now = self._clock()
        for backend in self.backends:
            backend.resize_engines(now, self._numbers)
        self._engines = {engine.index: engine for engine in self.engines()}

    def _limit_changed(self, backend: Backend, change: LimitChange) -> None:
        backend.resize_engines(self._clock(), self._numbers)
        self._notify("backend_limit", self.on_limit, backend, change)

    def _changed(self) -> None:
        self._resize_engines()
        self._notify("fleet_change", self.on_change)

    def _notify(self, task: str, listeners: Sequence[Callable[..., None]], *news: object) -> None:
        """What a listener raises reaches neither the others nor the request in which the fleet changed."""
        for listener in listeners:
            with self._supervisor.guard(task):
                listener(*news)


def _families(backends: Sequence[Backend]) -> dict[str, str]:
    families: dict[str, str] = {}
    for backend in backends:
        by_root: dict[str, str] = {}
        for card in backend.facts.models:
            families.setdefault(card.id, card.parent or by_root.setdefault(card.root or card.id, card.id))
    return families


class _View(NamedTuple):
    """The part of a backend's health that decides where requests go."""

    state: State
    gone: bool
    ever_up: bool
    ejected_until: float  # decides which ejections are not carried out


def _view(backend: Backend) -> _View:
    health = backend.health
    return _View(health.state, health.gone, health.ever_up, health.ejected_until)


def _limiter(config: AdmissionConfig) -> Limiter:
    return Limiter(adaptive=config.adaptive, itl_objective_seconds=config.itl_objective_seconds)


def _sizes(backend: Backend) -> tuple[object, ...]:
    """What listeners read of a backend when the fleet notifies them."""
    facts = backend.facts
    sizes = backend.cap, backend.kv_cache_tokens, facts.engines, facts.block_size_tokens, facts.prefix_caching
    return *sizes, facts.kv_event_sources


def _was_refused(cause: BaseException | None) -> bool:
    return isinstance(cause, ConnectionRefusedError) or (
        isinstance(cause, OSError) and cause.errno in UNREACHABLE_ERRNOS
    )


def _differ(old: object, new: object) -> bool:
    return old is not None and new is not None and old != new
