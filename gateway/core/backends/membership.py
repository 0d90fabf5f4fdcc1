"""The set of backends that the fleet should have: from the configuration and discovery, changed by hand. Pure.

Changes by hand stand until they are taken back by hand; reading a source again does not undo them.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet, FleetChanges, Wanted
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import BackendExists, BackendNotFound
from gateway.core.turns import Steps

BY_HAND = "by hand"
_FILE = "file"  # the source that is the configuration
_CHANGED_AT_ONCE = 32  # backends; all of the fleet's listeners look at all backends after each change


class Membership:
    """Owner of the sources' lists and of the changes by hand. Every change is applied to the fleet immediately."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sources = {_FILE: {backend.name: Wanted(backend.config) for backend in fleet.backends}}
        self._added: dict[str, BackendConfig] = {}
        self._removed: set[str] = set()
        self._drained: set[str] = set()

    @property
    def removed(self) -> list[str]:
        """Names that a source lists and an operator removed."""
        return sorted(self._removed)

    def state(self) -> dict[str, Any]:
        """The changes by hand and the discovered backends, for `restore`."""
        return {
            "added": [_dumped(Wanted(config)) for config in self._added.values()],
            "removed": sorted(self._removed),
            "drained": sorted(self._drained),
            "found": {
                source: [_dumped(each) for each in listed.values()]
                for source, listed in self._sources.items()
                if source != _FILE
            },
        }

    def restore(self, state: dict[str, Any], sources: Collection[str]) -> None:
        """Repeat another process's changes by hand, and start from its lists of these sources."""
        for source in sources:
            found = [_loaded(each) for each in state["found"].get(source, ())]
            self._sources[source] = {each.config.name: each for each in found}
        listed = {name for names in self._sources.values() for name in names}
        added = [_loaded(each).config for each in state["added"]]
        self._added = {config.name: config for config in added if config.name not in listed}
        self._removed, self._drained = set(state["removed"]) & listed, set(state["drained"])
        self._apply()

    def origin(self, name: str) -> str:
        """The source that lists a backend, or `by hand`."""
        listing = [source for source, listed in self._sources.items() if name in listed]
        return listing[0] if listing else BY_HAND

    def zone(self, name: str) -> str:
        """The zone of a backend, by the first source that lists it; empty = unknown."""
        return next((listed[name].zone for listed in self._sources.values() if name in listed), "")

    def reconcile(self, source: str, listed: Iterable[Wanted]) -> Steps[FleetChanges]:
        """Replace the list of a source. A backend that was added by hand belongs to the source once listed.

        Each step changes a few backends, new ones first; a removed backend leaves earlier if a new one has its URL.
        """
        target, changes = {each.config.name: each for each in listed}, FleetChanges()
        while True:
            known = self._sources.get(source, {})
            new = [name for name in target if known.get(name) != target[name]]
            gone = [name for name in known if name not in target]
            if len(new) + len(gone) <= _CHANGED_AT_ONCE:
                self._sources[source] = target
                return changes.merged(self._sources_changed())
            few = {name: target[name] for name in new[:_CHANGED_AT_ONCE]}
            urls = {each.config.url for each in few.values()}
            leaving = {*(gone if new else gone[:_CHANGED_AT_ONCE])}
            leaving = {name for name in leaving if not new or known[name].config.url in urls}
            self._sources[source] = {name: each for name, each in (known | few).items() if name not in leaving}
            changes = changes.merged(self._sources_changed())
            yield

    def keep_sources(self, names: Iterable[str]) -> None:
        """Keep only these sources and the configuration; backends of other sources leave."""
        kept = {_FILE, *names}
        if gone := self._sources.keys() - kept:
            self._sources = {name: listed for name, listed in self._sources.items() if name not in gone}
            self._sources_changed()

    def _sources_changed(self) -> FleetChanges:
        known = {name for names in self._sources.values() for name in names}
        self._added = {name: config for name, config in self._added.items() if name not in known}
        self._removed &= known
        return self._apply()

    def add(self, config: BackendConfig) -> Backend:
        """Add a backend, or take back its removal if a source lists it. Raises BackendExists."""
        known = {backend.name: backend.config for backend in self._fleet.backends}
        listed = {name: each.config for names in self._sources.values() for name, each in names.items()}
        for other in (known | listed).values():
            is_back = other.name in self._removed and other.url == config.url
            if (config.name == other.name or config.url == other.url) and not (is_back and config.name == other.name):
                raise BackendExists(
                    f"{config.url} cannot be added as {config.name!r}: backend {other.name!r} is at {other.url}."
                    " Remove it first, or use another name."
                )
        if config.name in self._removed:
            self._removed.discard(config.name)
        else:
            self._added[config.name] = config
        self._apply()
        return self._fleet.by_name[config.name]

    def remove(self, name: str) -> Backend:
        """Remove a backend, which leaves when its last request has ended. Raises BackendNotFound."""
        backend = self.find(name)
        self._added.pop(name, None)
        self._drained.discard(name)
        if self.origin(name) != BY_HAND:
            self._removed.add(name)
        self._apply()
        return backend

    def drain(self, name: str) -> Backend:
        """Send a backend no new requests. Raises BackendNotFound."""
        backend = self.find(name)
        self._drained.add(name)
        self._apply()
        return backend

    def undrain(self, name: str) -> Backend:
        """Take a drain by hand back. Raises BackendNotFound."""
        backend = self.find(name)
        self._drained.discard(name)
        self._apply()
        return backend

    def find(self, name: str) -> Backend:
        """The backend of that name. Raises BackendNotFound."""
        backend = self._fleet.by_name.get(name)
        if backend is None:
            known = ", ".join(sorted(self._fleet.by_name)) or "none"
            raise BackendNotFound(f"No backend is named {name[:256]!r}. Backends: {known[:2048]}.")
        return backend

    def _apply(self) -> FleetChanges:
        wanted = self._wanted()
        changes = self._fleet.reconcile(wanted)
        self._drained &= wanted.keys()  # a later backend of this name is another
        return changes

    def _wanted(self) -> Mapping[str, Wanted]:
        """By name. For a name or URL listed several times, the first source counts, and a backend added by hand
        precedes others with its URL: two backends for one server would have two caps."""
        wanted: dict[str, Wanted] = {}
        taken = {config.url for config in self._added.values()}
        for listed in self._sources.values():
            new = {name: each for name, each in listed.items() if name not in wanted and each.config.url not in taken}
            wanted |= new
            taken |= {each.config.url for each in new.values()}
        wanted |= {name: Wanted(config) for name, config in self._added.items()}
        for name in self._removed:
            wanted.pop(name, None)
        for name in self._drained & wanted.keys():
            wanted[name] = Wanted(wanted[name].config, BY_HAND)
        return wanted


def _dumped(wanted: Wanted) -> list[Any]:
    return [wanted.config.model_dump(mode="json"), wanted.draining, wanted.zone]


def _loaded(dumped: list[Any]) -> Wanted:
    config, draining, zone = dumped
    return Wanted(BackendConfig.model_validate(config), draining, zone)
