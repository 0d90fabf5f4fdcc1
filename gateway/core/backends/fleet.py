"""The fleet: the only owner of the backends' state, and of the current backends of each model.

`reconcile` changes the set of backends. A removed one gets no new requests, and leaves when its last request has ended.
Reads are lookups in a snapshot that is replaced whenever evidence changes it. Evidence comes from the relay (requests)
and from the probe (/health, /v1/models, /metrics).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from random import Random

from gateway.config import AdmissionConfig, HealthConfig
from gateway.core.backends.backend import FALLING_ASLEEP, Backend, EngineNumbers
from gateway.core.backends.concurrency_limit import LimitChange, Limiter
from gateway.core.backends.facts import Facts, ModelCard, Telemetry
from gateway.core.backends.health import Blame, HealthView, ProbeResult
from gateway.core.backends.reachability import kind_of
from gateway.core.backends.served_names import ServedNames
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import BackendError, ConnectFailed, EngineDead
from gateway.core.routing.engine import Engine, EngineUse
from gateway.core.supervisor import Supervisor

Clock = Callable[[], float]
_MOST_REASONS = 3  # in one message
_FORGOTTEN = 16  # backends a call, so that requests do not wait for it


@dataclass(frozen=True, slots=True)
class Wanted:
    """A backend that the fleet should have. `draining`: why it gets no new requests; empty = it gets them. `zone`: its
    location, if its source knows it."""

    config: BackendConfig
    draining: str = ""
    zone: str = ""


@dataclass(slots=True)
class FleetChanges:
    """Names of backends by change. `replaced`: another server takes the name."""

    _: KW_ONLY
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def merged(self, later: "FleetChanges") -> "FleetChanges":
        """These changes, followed by the later ones."""
        return FleetChanges(
            added=self.added + later.added,
            removed=self.removed + later.removed,
            replaced=self.replaced + later.replaced,
            changed=self.changed + later.changed,
        )


def eligible(backends: Sequence[Backend], max_ejected: float) -> tuple[Backend, ...]:
    """The backends of a model that may get requests; never draining, sleeping or certainly gone ones.

    Backends that answer probes in time are preferred. The share `max_ejected` limits ejections; the earliest to end are
    lifted first. If no backend is left, all that are not gone are used: probes alone must not stop the traffic.
    """
    backends = [backend for backend in backends if not (backend.draining or backend.sleep_state)]
    present = [backend for backend in backends if not backend.health.gone]
    too_many = sum(backend.health.state == "ejected" for backend in backends) - int(len(backends) * max_ejected)
    sparable = [backend for backend in present if backend.health.state == "ejected"]
    sparable.sort(key=lambda backend: backend.health.ejected_until)
    spared = sparable[: max(0, too_many)]
    usable = tuple(each for each in present if each.health.state == "up" or each in spared)
    return tuple(each for each in usable if not each.health.late) or usable or tuple(present)


class Fleet:
    """All backends. Synchronous methods only, called from one event loop."""

    def __init__(
        self,
        backends: Sequence[BackendConfig],
        health: HealthConfig,
        *,
        clock: Clock,
        random: Random,
        admission: AdmissionConfig | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.backends: tuple[Backend, ...] = ()
        self.leaving: tuple[Backend, ...] = ()  # removed, with requests in flight
        self.by_name: dict[str, Backend] = {}
        self.on_change: list[Callable[[], None]] = []
        self.on_facts: list[Callable[[], None]] = []  # a change of the backends or of their reports; after `on_change`
        self.on_leave: list[Callable[[Backend], None]] = []  # its last request has ended
        self.on_restart: list[Callable[[Backend], None]] = []
        self.on_sleep: list[Callable[[Backend], None]] = []  # its KV cache is lost
        self.on_probe_wanted: list[Callable[[Backend], None]] = []  # this backend should be probed soon
        self.on_limit: list[Callable[[Backend, LimitChange | None], None]] = []  # None = by its slow start
        self.ready = False
        self._health = health
        self._admission = admission or AdmissionConfig()
        self._random = random
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock)
        self._expected_models: Collection[str] = ()
        self._adapters: Mapping[str, str] = {}  # that may be loaded on demand, with the model of each
        self._listing: dict[str, list[Backend]] = {}  # the backends that list a model
        self._serving: dict[str, tuple[Backend, ...]] = {}
        self.names = ServedNames()
        self._numbers = EngineNumbers(clock)
        self._owners: dict[int, Backend] = {}  # of all engines, by number
        self.reconcile({each.name: Wanted(each) for each in backends})

    def reconcile(self, wanted: Mapping[str, Wanted]) -> FleetChanges:
        """Have exactly these backends, by name. The same server under other settings keeps its state."""
        changes, staying, joins = FleetChanges(), dict[str, Backend](), self.ready
        for backend in self.backends:
            target = wanted.get(backend.name)
            if target is not None and target.config.url == backend.config.url:
                staying[backend.name] = backend
                if target.config != backend.config:
                    backend.reconfigure(target.config)
                    changes.changed.append(backend.name)
            else:
                (changes.removed if target is None else changes.replaced).append(backend.name)
                backend.drain("removed" if target is None else "replaced", self._clock())
                self.leaving += (backend,)
        for name, target in wanted.items():
            if name not in staying:
                staying[name] = self._new(target.config, joins_others=joins)
                if name not in changes.replaced:
                    changes.added.append(name)
            staying[name].drain(target.draining, self._clock())
        self.by_name = {name: staying[name] for name in wanted}
        self.backends = tuple(self.by_name.values())
        self._rebuild(must_notify=True)
        return changes

    def apply_settings(self, health: HealthConfig, admission: AdmissionConfig) -> None:
        """Take over other settings of health and limits. Learned state stays."""
        if (health, admission) == (self._health, self._admission):
            return
        self._health, self._admission = health, admission
        for backend in (*self.backends, *self.leaving):
            backend.apply(health, admission)
        self._rebuild(must_notify=True)

    def expect(self, models: Collection[str]) -> None:
        """Models in the configuration: before its first list, a backend may have them."""
        self._expected_models = models

    def expect_adapters(self, adapters: Mapping[str, str]) -> None:
        """Adapters that backends of these models load when requests wait for them."""
        self._adapters = adapters

    def _new(self, config: BackendConfig, *, joins_others: bool) -> Backend:
        admission = self._admission
        limiter = Limiter(adaptive=admission.adaptive, itl_objective_seconds=admission.itl_objective_seconds)
        return Backend(
            self._numbers.take(),
            config,
            health=self._health,
            random=self._random,
            limiter=limiter,
            joins_others=joins_others,
        )

    def let_go(self) -> None:
        """Forget a few leaving backends whose last request has ended. To be called often."""
        for backend in [each for each in self.leaving if not each.in_flight][:_FORGOTTEN]:
            self.leaving = tuple(each for each in self.leaving if each is not backend)
            self._notify("backend_leave", self.on_leave, backend)
            for engine in backend.all_engines:
                del self._owners[engine.index]
                self._numbers.free(engine.index)

    def share(self, parts: Mapping[int, EngineUse | None]) -> None:
        """Use these parts of engines, by number, and all of the others: another process uses the rest."""
        for backend in (*self.backends, *self.leaving):
            for engine in backend.all_engines:
                slots, tokens = engine.slots, engine.kv_cache_tokens
                engine.share(parts.get(engine.index))
                if (slots, tokens) != (engine.slots, engine.kv_cache_tokens):
                    self._notify("backend_limit", self.on_limit, backend, None)

    def grant(self, blocks: Mapping[int, EngineUse]) -> None:
        """Use these blocks of engines, by number: other gateways use the rest."""
        for backend in (*self.backends, *self.leaving):
            for engine in backend.all_engines:
                if (block := blocks.get(engine.index)) is not None:
                    engine.grant(block)

    def owner(self, index: int) -> Backend:
        """The backend of the engine with this number, while it exists."""
        return self._owners[index]

    @property
    def is_known(self) -> bool:
        """Whether every backend has listed its models, or is unreachable."""
        return all(each.health.state == "down" or (each.health.ever_up and each.facts.models) for each in self.backends)

    def url_of(self, name: str) -> str:
        """The address of a backend; empty = it has left."""
        backend = self.by_name.get(name)
        return "" if backend is None else backend.config.url

    def serving(self, model: str) -> tuple[Backend, ...] | None:
        """The backends that may get a request for this model now; None = no backend ever listed it."""
        return self._serving.get(model)

    def candidates(self, model: str) -> list[Engine] | None:
        """The engines of these backends; None if the model does not exist.

        A model exists if it is in a backend's last list. Before a backend's first list, it may have any model while its
        first probe runs and no model at all is known; afterwards only a model that was listed before or is expected.
        """
        if serving := self._serving.get(model):
            return [engine for backend in serving for engine in backend.engines]
        if model in self._adapters or not self.backends:
            return []
        if any(model in backend.context_tokens for backend in self.backends):
            return []
        without_list = [backend for backend in self.backends if not backend.facts.models]
        is_expected = not self._serving or model in self._serving or model in self._expected_models
        may_come = any(is_expected or backend.health.state == "unknown" for backend in without_list)
        return [] if may_come else None

    def why_none(self, model: str) -> str:
        """Why no backend serves the model now: a reason for each of the first few that have it, or may have it."""
        having = [backend for backend in self.backends if model in backend.context_tokens]
        having = having or [backend for backend in self.backends if not backend.facts.models]
        reasons = [f"{backend.name}: {reason}" for backend in having if (reason := backend.why_not)]
        more = [f"{len(reasons) - _MOST_REASONS} more"] if len(reasons) > _MOST_REASONS else []
        return "; ".join(reasons[:_MOST_REASONS] + more)

    def engines(self) -> list[Engine]:
        return [engine for backend in self.backends for engine in backend.engines]

    def engine(self, index: int) -> Engine | None:
        """The engine with this number; None if no backend runs it now."""
        return self._engines.get(index)

    def family(self, model: str) -> str:
        """The model whose engines a model runs on: itself, an adapter's base, or the first of its names."""
        return self.names.families.get(model, model)

    def families(self) -> list[str]:
        return list(dict.fromkeys(self.names.families.values()))

    def recovery_seconds(self) -> float:
        """Expected time until a backend is back: the end of an ejection, or enough good probes."""
        now = self._clock()
        probes = self._health.rise * self._health.probe_interval_seconds
        waits = [b.health.ejected_until - now if b.health.state == "ejected" else probes for b in self.backends]
        return max(0.5, min(waits, default=probes))

    def models(self) -> tuple[ModelCard, ...]:
        """The models that backends last listed; of several cards for one, that with the shortest context."""
        cards: dict[str, ModelCard] = {}
        for backend in self.backends:
            for card in backend.facts.models:
                known = cards.setdefault(card.id, card)
                if (card.max_model_len or math.inf) < (known.max_model_len or math.inf):
                    cards[card.id] = card
        return tuple(cards.values())

    def only_model(self) -> str | None:
        """The model of requests that name none, if there is just one."""
        models = self.models()
        return models[0].id if len(models) == 1 else None

    def adapter(self, model: str) -> str | None:
        """The model's name, if it is a LoRA adapter of another."""
        cards = [card for backend in self._serving.get(model, ()) for card in backend.facts.models if card.id == model]
        return model if any(card.parent for card in cards) else None

    def succeeded(self, backend: Backend, tenant: str | None = None) -> None:
        """A request was answered; `tenant`: its tenant, if known."""
        health = backend.health
        doubted = health.refused or health.late
        health.succeeded(self._clock(), tenant)
        if doubted and not health.gone:
            self._rejudge(backend)

    def failed(self, backend: Backend, error: BackendError, tenant: str | None = None) -> None:
        """A request failed. Errors that are not the backend's fault are not counted; `tenant` as in `succeeded`."""
        since = error.silent_since
        if not error.counts_as_failure or (since is not None and backend.health.progressed_at > since):
            return
        cause = error.__cause__ if isinstance(error, ConnectFailed) else None
        refused = cause is not None and kind_of(cause) is ProbeResult.REFUSED
        before = backend.health.view
        if error.answered:
            backend.health.erred(self._clock(), tenant, self._peers(backend))
        else:
            backend.health.failed(self._clock(), fatal=isinstance(error, EngineDead), refused=refused)
        self._judged(backend, before)
        after = backend.health.view
        if (after.state, after.gone) != (before.state, before.gone):
            self._notify("backend_doubt", self.on_probe_wanted, backend)

    def _peers(self, backend: Backend) -> list[Blame]:
        """The blame of other backends that serve a model of this one."""
        models = backend.context_tokens.keys()
        others = [other for other in self.backends if other is not backend]
        return [other.health.blame for other in others if not models.isdisjoint(other.context_tokens)]

    def model_missing(self, backend: Backend, model: str) -> None:
        """A backend reported a listed model as missing: others are used until it lists its models again."""
        if model in backend.context_tokens:
            backend.missing.add(model)
            self._rejudge(backend)
            self._notify("backend_doubt", self.on_probe_wanted, backend)

    def list_read(self, backend: Backend, missing: frozenset[str]) -> None:
        """The backend has listed its models again (`learned` gets the list). `missing`: models already reported as
        missing when it was asked; the list says nothing about later reports."""
        if missing:
            backend.missing.difference_update(missing)
            self._rejudge(backend)

    def probed(self, backend: Backend, probe: ProbeResult, reason: str = "") -> None:
        """A probe of /health ended; `reason`: why it did not succeed."""
        before = backend.health.view
        may_be_another = backend.health.probed(probe, self._clock(), reason)
        # If the process's start is known, the next scrape shows whether it is another process.
        if may_be_another and before.ever_up and backend.facts.process_start_seconds is None:
            self._restarted(backend, backend.context_tokens)
        self._judged(backend, before)

    def resume(self, backend: Backend, facts: Facts) -> None:
        """Another process of the gateway used the backend before: it does not start slowly."""
        backend.is_known()
        self.learned(backend, facts)

    def learned(self, backend: Backend, facts: Facts) -> None:
        old, sizes = backend.facts, _sizes(backend)
        if facts == old:
            return
        backend.learn(facts)
        models = [card.id for card in (*old.models, *facts.models)]
        before, start = old.process_start_seconds, facts.process_start_seconds
        is_another = _differ(before, start) or _differ(old.version, facts.version)
        if is_another and self._is_restart(backend, before, start):
            backend.health.restarted()
            self._restarted(backend, models)
        else:
            self._rebuild(must_notify=sizes != _sizes(backend), models=models)

    def measured(self, backend: Backend, telemetry: Telemetry | None) -> None:
        """The backend's load was read; None = the last sample is too old."""
        old, knows_start = backend.telemetry, backend.facts.process_start_seconds is not None
        is_back = old and telemetry and telemetry.prefix_queries_tokens < old.prefix_queries_tokens
        if is_back and not knows_start and self._is_restart(backend, None, None):
            return self._restarted(backend, backend.context_tokens)  # a counter went back to zero
        kv_tokens, change = backend.kv_cache_tokens, backend.measured(telemetry)
        if change:
            self._limit_changed(backend, change)
        if telemetry and telemetry.sleep_state is not None and backend.sleep_state != FALLING_ASLEEP:
            self.slept(backend, "" if telemetry.sleep_state == "awake" else telemetry.sleep_state)
        if backend.kv_cache_tokens != kv_tokens:
            self._rebuild(must_notify=True, models=())

    def _is_restart(self, backend: Backend, before: float | None, start: float | None) -> bool:
        """Whether another process has replaced the last one. With several processes, no slow start goes on."""
        if not (is_restart := backend.restarts.is_restart(before, start, self._clock())):
            backend.start_slowly(None)
            self._limit_changed(backend)
        return is_restart

    def slept(self, backend: Backend, state: str) -> None:
        """The backend sleeps in this state of vLLM's sleep mode; empty = it is awake."""
        if state == backend.sleep_state:
            return
        was_awake = not backend.sleep_state
        backend.slept(state)
        if was_awake:
            self._notify("backend_sleep", self.on_sleep, backend)
        self._rebuild(must_notify=True, models=backend.context_tokens)

    def will_serve(self, model: str) -> bool:
        """Whether a backend will soon serve this model for requests that wait: woken, or with the adapter loaded."""
        if model in self._adapters and self._serving.get(self._adapters[model]):
            return True
        return any(backend.can_wake for backend in self.backends if model in backend.context_tokens)

    def tick(self, backend: Backend) -> None:
        """Time has passed: end an ejection that is over, and notify of the limit of a slow start."""
        now = self._clock()
        before = backend.health.view
        backend.health.tick(now)
        self._judged(backend, before)
        since = backend.slow_since_seconds
        if since is not None:
            if now - since >= backend.slow_start_seconds:
                backend.start_slowly(None)
            self._limit_changed(backend)

    def _judged(self, backend: Backend, before: HealthView) -> None:
        after = backend.health.view
        if after == before:
            return
        if after.state != before.state:
            backend.changed_state(self._clock(), was_up=before.ever_up)
        self._rejudge(backend)

    def _restarted(self, backend: Backend, models: Iterable[str]) -> None:
        """Another process answers; `models`: models that either process lists."""
        if change := backend.restarted(self._clock()):
            self._limit_changed(backend, change)
        self._notify("backend_restart", self.on_restart, backend)  # before on_change, which may place requests
        self._rebuild(must_notify=True, models=models)

    def _rebuild(self, must_notify: bool = False, models: Iterable[str] | None = None) -> None:
        """Read the lists of all backends, and decide again who serves these models; None = all of them."""
        self._listing = {model: [] for model in self._serving}
        for backend in self.backends:
            for card in backend.facts.models:
                self._listing.setdefault(card.id, []).append(backend)
        has_names = self.names.update([backend.facts.models for backend in self.backends])
        others_serve = self._judge(self._listing if models is None else models)
        if others_serve or must_notify or has_names:  # the scheduler reads names with the engines
            self._resize_engines()
            self._notify("fleet_change", self.on_change)
            self._notify("fleet_change", self.on_facts)

    def _rejudge(self, backend: Backend) -> None:
        """The health of one backend has changed: others may serve its models."""
        if self._judge(backend.context_tokens):
            backend.resize_engines(self._clock(), self._numbers.take)
            self._notify("fleet_change", self.on_change)

    def _judge(self, models: Iterable[str]) -> bool:
        """Decide which backends may serve these models now; returns whether others did before."""
        changed = False
        for model in models:
            listed = self._listing.get(model)
            if listed is None:
                continue
            having = [each for each in listed if model not in each.missing] or listed
            serving = eligible(having, self._health.max_ejected)
            if serving and all(backend.slow_since_seconds is not None for backend in serving):
                for backend in serving:  # no other backend could take the load that they are spared
                    backend.start_slowly(None)
                    backend.resize_engines(self._clock(), self._numbers.take)
            if serving != self._serving.get(model):
                self._serving[model] = serving
                changed = True
        self.ready = any(self._serving.values()) or any(backend.can_wake for backend in self.backends)
        return changed

    def _resize_engines(self) -> None:
        for backend in self.backends:
            backend.resize_engines(self._clock(), self._numbers.take)
        self._engines = {engine.index: engine for engine in self.engines()}
        for backend in self.backends:
            for engine in backend.all_engines:
                self._owners[engine.index] = backend

    def _limit_changed(self, backend: Backend, change: LimitChange | None = None) -> None:
        backend.resize_engines(self._clock(), self._numbers.take)
        self._notify("backend_limit", self.on_limit, backend, change)

    def _notify(self, task: str, listeners: Sequence[Callable[..., None]], *news: object) -> None:
        """An error in a listener reaches neither other listeners nor the request in which the fleet changed."""
        for listener in listeners:
            with self._supervisor.guard(task):
                listener(*news)


def _sizes(backend: Backend) -> tuple[object, ...]:
    """The state of a backend that listeners read."""
    facts = backend.facts
    engines = facts.engines, facts.block_size_tokens, facts.prefix_caching, facts.kv_event_sources
    return backend.cap, backend.kv_cache_tokens, *engines, facts.models


def _differ(old: object, new: object) -> bool:
    return old is not None and new is not None and old != new
