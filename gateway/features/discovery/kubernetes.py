"""The backends that EndpointSlices in Kubernetes list, and their changes.

A Service has several slices: one set for each IP family and each set of ports, of at most 100 endpoints each. So a pod
may be in several of them: in one for each family, or in two while it moves from one slice to another. The rules:

- A terminating pod is not listed, regardless of its slices: it never serves again. The fleet then sends it no new
  requests, and lets its streams end.
- A pod that is not ready is listed, but drains: it may be back soon, with its KV cache and learned state.
- Of a pod's addresses one is used: a ready one first, IPv4 before IPv6.

The slices are listed, then watched for changes from there on. A watch ends after a minute, and the next one continues
from the last seen version, as after a lost connection. Only if the API server no longer has that version (410) are the
slices listed again. This module is imported where it is used: the client of the API takes 60 MiB.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import yaml
from kubernetes_asyncio.client import ApiClient, Configuration, DiscoveryV1Api
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
from pydantic import ValidationError

from gateway import __version__
from gateway.core.backends.fleet import Wanted
from gateway.core.backends.settings import BackendConfig, DiscoveredBackend
from gateway.core.turns import SLICE_BYTES
from gateway.features.discovery.listings import DiscoveryError, Listing
from gateway.features.discovery.settings import KubernetesDiscovery
from gateway.files import MAX_CONFIG_BYTES, read_file

T = TypeVar("T")
NOT_READY = "not ready"
_FAMILIES = ("IPv4", "IPv6", "FQDN")  # address types, the preferred one first
_MAX_NAME_LENGTH = 128  # of a backend
_MOST_PROBLEMS = 3  # in one message
_MAX_LIST_BYTES = 8 << 20
_MAX_LIST_CONTAINERS = 65536  # these take longest to read; an endpoint has five
_MOST_MADE = 4096
_LIST_SECONDS = 10.0
_WATCH_SECONDS = 60  # and no more, so that a connection that is dead but was not closed is noticed
_GRACE_SECONDS = 10.0
_SHORTEST_WATCH_SECONDS = 1.0  # a watch that ends sooner, without an event, has failed
_OK, _UNAUTHORIZED, _GONE = 200, 401, 410
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# The library's errors for incomplete credentials.
_BAD_CREDENTIALS = (ConfigException, OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AssertionError)


class SliceMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The part of an object's or a list's metadata that is used here."""

    name: str = ""
    resource_version: str = ""


class PodReference(msgspec.Struct, frozen=True):
    """The pod of an endpoint. Another pod of the same name has another uid."""

    name: str = ""
    uid: str = ""


class EndpointConditions(msgspec.Struct, frozen=True):
    """The API's defaults for unknown conditions: ready, and not terminating."""

    ready: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    """One endpoint. Its addresses are equivalent; the API allows to use the first one alone."""

    addresses: tuple[str, ...] = ()
    conditions: EndpointConditions | None = None
    target_ref: PodReference | None = None
    zone: str | None = None


class SlicePort(msgspec.Struct, frozen=True):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """One slice. A Service without pods has a slice with null endpoints."""

    metadata: SliceMetadata
    address_type: str = ""
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


class EndpointSliceList(msgspec.Struct, frozen=True):
    """The answer to a list request."""

    metadata: SliceMetadata
    items: tuple[EndpointSlice, ...] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch. The type determines the object's schema."""

    type: str
    object: msgspec.Raw


class ApiStatus(msgspec.Struct, frozen=True):
    """Why the API server refused a request or ended a watch."""

    code: int = 0
    message: str | None = ""


class SlicesExpired(Exception):
    """The API server has dropped changes since the last event: the slices must be listed again."""


class SliceTable:
    """The slices by name, as of `version`, the start of a watch; empty = they must be listed first."""

    def __init__(self) -> None:
        self.version = ""
        self._slices: dict[str, EndpointSlice] = {}

    @property
    def slices(self) -> list[EndpointSlice]:
        return list(self._slices.values())

    def expire(self) -> None:
        """A watch cannot go on from here: the slices must be listed again."""
        self.version = ""

    def replace(self, document: bytes) -> None:
        """Take the answer to a list request. Raises DiscoveryError."""
        if document.count(b"{") + document.count(b"[") > _MAX_LIST_CONTAINERS:
            raise DiscoveryError(f"the API server lists over {_MAX_LIST_CONTAINERS} objects and arrays, the limit")
        listed = _decoded(document, EndpointSliceList)
        self._slices = {each.metadata.name: each for each in listed.items or ()}
        self.version = listed.metadata.resource_version

    def update(self, line: bytes) -> None:
        """Take one event of a watch. Raises SlicesExpired, and DiscoveryError."""
        event = _decoded(line, WatchEvent)
        if event.type == "ERROR":
            status = _decoded(event.object, ApiStatus)
            if status.code == _GONE:
                raise SlicesExpired
            raise DiscoveryError(f"the watch failed: {status.code} {status.message}")
        changed = _decoded(event.object, EndpointSlice)
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[changed.metadata.name] = changed
        elif event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        # A BOOKMARK has only the version; future event types will have it.
        self.version = changed.metadata.resource_version or self.version


def status_message(body: bytes) -> str:
    """The reason in an answer that is an error; empty if it has none."""
    try:
        return msgspec.json.decode(body, type=ApiStatus).message or ""
    except msgspec.DecodeError:
        return ""


def listed_backends(
    slices: Iterable[EndpointSlice],
    config: KubernetesDiscovery,
    settings: Mapping[str, Any],
    made: dict["_Sighting", Wanted] | None = None,
) -> Listing:
    """The backends of these slices, by name. `settings`: of every backend; `made`: backends of earlier listings."""
    made = {} if made is None else made
    slices, problems = sorted(slices, key=lambda each: each.metadata.name), list[str]()
    if not slices:
        problems.append(f"no EndpointSlice of {config.service or config.selector}: check the name and the namespace")
    sightings = [each for one in slices for each in _sightings(one, config, problems)]
    terminating = {each.pod for each in sightings if each.terminating}
    staying = [each for each in sightings if each.port and each.pod not in terminating]
    here = [each for each in staying if config.zone in ("", each.zone)]
    if sightings and config.zone not in ("", *(each.zone for each in sightings)):
        zones = ", ".join(sorted({each.zone for each in sightings if each.zone})) or "none"
        problems.append(f"no endpoint is in zone {config.zone}; zones: {zones}")
    found: dict[str, Wanted] = {}
    urls = set[str]()
    for each in sorted(here, key=lambda each: each.preference):
        try:
            wanted = made.get(each) or made.setdefault(each, each.wanted("https" if config.tls else "http", settings))
        except ValidationError:
            problems.append(f"{each.name or 'an endpoint'} has an address that cannot be used: {each.host}")
            continue
        if wanted.config.name not in found and wanted.config.url not in urls:
            found[wanted.config.name] = wanted
            urls.add(wanted.config.url)
    shown = problems[:_MOST_PROBLEMS] + [f"{len(problems) - _MOST_PROBLEMS} more"] * (len(problems) > _MOST_PROBLEMS)
    return Listing(tuple(found[name] for name in sorted(found)), "; ".join(shown))


@dataclass(frozen=True, slots=True)
class _Sighting:
    """One endpoint in one slice. `pod` is the same for all sightings of a pod, and for no other pod's."""

    pod: str
    _: KW_ONLY
    name: str
    host: str
    port: int
    family: int
    zone: str
    ready: bool
    terminating: bool

    @property
    def preference(self) -> tuple[object, ...]:
        """A pod's sighting with the smallest value is used."""
        return not self.ready, self.family, self.host, self.port, self.name, self.pod, self.zone

    def wanted(self, scheme: str, settings: Mapping[str, Any]) -> Wanted:
        """Raises ValidationError if the API lists an invalid address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        name = self.name if len(self.name) <= _MAX_NAME_LENGTH else ""
        config = BackendConfig.model_validate({**settings, "url": f"{scheme}://{host}:{self.port}", "name": name})
        return Wanted(config, "" if self.ready else NOT_READY, self.zone)


def _sightings(one: EndpointSlice, config: KubernetesDiscovery, problems: list[str]) -> Iterator[_Sighting]:
    endpoints = [each for each in one.endpoints or () if each.addresses]
    if not endpoints or one.address_type not in _FAMILIES:
        return
    port = _port(one, config.port, problems)
    for each in endpoints:
        reference, conditions = each.target_ref or PodReference(), each.conditions or EndpointConditions()
        host = each.addresses[0]
        yield _Sighting(
            pod=reference.uid or reference.name or f"{host}:{port}",
            name=reference.name,
            host=host,
            port=port,
            family=_FAMILIES.index(one.address_type),
            zone=each.zone or "",
            ready=conditions.ready is not False,
            terminating=conditions.terminating is True,
        )


def _port(one: EndpointSlice, wanted: int | str | None, problems: list[str]) -> int:
    """The port of a slice's endpoints; 0 and a problem if the slice lacks the configured port."""
    if isinstance(wanted, int):
        return wanted
    ports = [each for each in one.ports or () if each.port and (each.protocol or "TCP") == "TCP"]
    names = ", ".join(f"{each.name or 'unnamed'} {each.port}" for each in ports) or "none"
    found = [each.port or 0 for each in ports if wanted in (None, each.name)]
    if len(found) == 1:
        return found[0]
    if wanted is not None:
        problems.append(f"EndpointSlice {one.metadata.name} has no port named {wanted}; ports: {names}")
    else:
        problems.append(f"EndpointSlice {one.metadata.name} does not have exactly one port: set port; ports: {names}")
    return 0


def _decoded(document: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(document, type=kind)
    except msgspec.DecodeError as error:
        raise DiscoveryError(f"the API server sent something else than expected: {error}") from error


class KubernetesEndpoints:
    """The pods behind a Service, or behind the EndpointSlices that a label selector matches."""

    def __init__(
        self, config: KubernetesDiscovery, settings: DiscoveredBackend, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = _name_of(config)
        self._config = config
        self._settings = settings.model_dump(exclude_defaults=True)
        self._clock = clock
        self._table = SliceTable()
        self._labels = config.selector or f"kubernetes.io/service-name={config.service}"
        self._namespace = config.namespace
        self._client: ApiClient | None = None
        self._made: dict[_Sighting, Wanted] = {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KubernetesEndpoints):
            return False
        return (other._config, other._settings) == (self._config, self._settings)

    def __hash__(self) -> int:
        return hash(self._config)

    async def listings(self) -> AsyncGenerator[Listing, None]:
        """The backends as listed, and after each event of a watch. Raises DiscoveryError."""
        try:
            while True:
                is_fresh = not self._table.version
                if is_fresh:
                    await self._list()
                    yield self._listing()
                async with aclosing(self._watch(is_fresh)) as events:
                    async for _ in events:
                        yield self._listing()
                yield self._listing()  # the watch has ended normally: previous failures are over
        except (aiohttp.ClientError, OSError) as error:
            raise DiscoveryError(f"the API server cannot be reached: {str(error) or type(error).__name__}") from error
        finally:
            await self._close()

    def _listing(self) -> Listing:
        if len(self._made) > _MOST_MADE:
            self._made.clear()
        return listed_backends(self._table.slices, self._config, self._settings, self._made)

    async def _list(self) -> None:
        async with await self._get(_request_timeout=_LIST_SECONDS) as response:
            document = bytearray()
            async for piece in response.content.iter_chunked(SLICE_BYTES):
                document += piece
                if len(document) > _MAX_LIST_BYTES:
                    raise DiscoveryError(f"the API server lists over {_MAX_LIST_BYTES} bytes, the limit")
            self._table.replace(bytes(document))

    async def _watch(self, is_fresh: bool) -> AsyncGenerator[None, None]:
        """Yields after each event, until the next watch or the next list is due. `is_fresh`: just listed."""
        began, seen = self._clock(), 0
        query = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": _WATCH_SECONDS}
        timeout = _WATCH_SECONDS + _GRACE_SECONDS
        try:
            async with await self._get(
                **query, resource_version=self._table.version, _request_timeout=timeout
            ) as response:
                async for line in response.content:
                    if not line.endswith(b"\n"):
                        raise DiscoveryError("the API server closed the connection in the middle of an event")
                    self._table.update(line)
                    seen += 1
                    yield
                    await asyncio.sleep(0)  # many lines may have come together
        except SlicesExpired:
            self._table.expire()
            if is_fresh and not seen:
                raise DiscoveryError("the API server does not have the version that it has just listed") from None
            return
        if not seen and self._clock() - began < _SHORTEST_WATCH_SECONDS:
            raise DiscoveryError("the API server ended a watch at once")

    async def _get(self, **query: Any) -> aiohttp.ClientResponse:
        """A list or a watch. If the token is refused, credentials are read again, once. Raises SlicesExpired and
        DiscoveryError for other answers than 200."""
        response = await self._ask(query)
        if response.status == _UNAUTHORIZED:
            response.release()
            await self._close()
            response = await self._ask(query)
        if response.status == _OK:
            return response
        async with response:
            message = status_message(await response.read()) or response.reason
            if response.status == _GONE:
                raise SlicesExpired
            raise DiscoveryError(f"the API server answered {response.status}: {message}")

    async def _ask(self, query: dict[str, Any]) -> aiohttp.ClientResponse:
        client = self._client = self._client or await self._connect()
        ask: Callable[..., Any] = DiscoveryV1Api(client).list_namespaced_endpoint_slice
        # The streamed answer, with its status: the library's own watch takes an empty one for the end of a watch.
        response: aiohttp.ClientResponse = await ask(
            self._namespace, label_selector=self._labels, _preload_content=False, **query
        )
        return response

    async def _connect(self) -> ApiClient:
        """A client with the credentials as they are now. Raises DiscoveryError."""
        configuration = Configuration()
        # Python 3.13 refuses certificates without key identifiers, which clusters have. Their chain is verified.
        configuration.disable_strict_ssl_verification = True
        file = self._config.kubeconfig
        try:
            if file:
                context = await _use_kubeconfig(_existing(file), configuration)
            else:
                load: Callable[..., None] = load_incluster_config
                load(client_configuration=configuration)  # and the token again each minute, which is rotated
                context = {}
            self._namespace = self._config.namespace or context.get("namespace") or _pod_namespace()
            client = ApiClient(configuration)
        except _BAD_CREDENTIALS as error:
            where = file or "the service account of the pod (outside of Kubernetes, set kubeconfig)"
            raise DiscoveryError(f"{where}: {str(error) or type(error).__name__}") from error
        client.user_agent = f"vllm-batching-gateway/{__version__}"
        return client

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _name_of(config: KubernetesDiscovery) -> str:
    place = f"{config.namespace}/" if config.namespace else ""
    port = "" if config.port is None else f":{config.port}"
    others = config.model_dump(include={"tls", "zone", "kubeconfig"}, exclude_defaults=True)
    target = f"kubernetes {place}{config.service or f'({config.selector})'}{port}"
    return ", ".join([target, *(f"{key} {value}" for key, value in others.items())])


def _existing(file: str) -> str:
    """The path of a file that is there, which the library does not check. Raises OSError."""
    path = Path(file).expanduser()
    read_file(path, MAX_CONFIG_BYTES)
    return str(path)


async def _use_kubeconfig(file: str, configuration: Configuration) -> dict[str, Any]:
    """Take over the current context of a file, and return it."""
    loader = await load_kube_config(config_file=file, client_configuration=configuration, persist_config=False)
    if token := configuration.api_key.get("BearerToken"):
        configuration.api_key["BearerToken"] = token.strip()  # of a file that ends with a newline
    context: dict[str, Any] = (loader.current_context or {}).get("context", {})
    return context


def _pod_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError:
        return "default"
