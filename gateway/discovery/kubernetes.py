"""Follows EndpointSlices in Kubernetes: lists them, then watches for changes from there on.

A watch ends after a minute, and the next one goes on at the last version that was seen, as after a loss of the
connection. Only if the API server no longer has that version (410) are the slices listed again. This module is imported
where it is used: the client of the API takes 60 MiB.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes_asyncio.client import ApiClient, Configuration, DiscoveryV1Api
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from gateway import __version__
from gateway.config.backends import DiscoveredBackend, KubernetesDiscovery
from gateway.discovery.endpoint_slices import SlicesExpired, SliceTable, listed_backends, status_message
from gateway.discovery.listings import DiscoveryError, Listing

_LIST_SECONDS = 10.0
_WATCH_SECONDS = 60  # and no more, so that a connection that is dead but was not closed is noticed
_GRACE_SECONDS = 10.0
_SHORTEST_WATCH_SECONDS = 1.0  # one that ends sooner, without an event, has failed
_OK, _UNAUTHORIZED, _GONE = 200, 401, 410
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# What the library raises for credentials that lack something.
_BAD_CREDENTIALS = (ConfigException, OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AssertionError)


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
                yield self._listing()  # the watch has ended as it should: whatever had failed works again
        except (aiohttp.ClientError, OSError) as error:
            raise DiscoveryError(f"the API server cannot be reached: {str(error) or type(error).__name__}") from error
        finally:
            await self._close()

    def _listing(self) -> Listing:
        return listed_backends(self._table.slices, self._config, self._settings)

    async def _list(self) -> None:
        async with await self._get(_request_timeout=_LIST_SECONDS) as response:
            self._table.replace(await response.read())

    async def _watch(self, is_fresh: bool) -> AsyncGenerator[None, None]:
        """Yields after each event, until the next watch or the next list has to follow. `is_fresh`: just listed."""
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
                    self._table.apply(line)
                    seen += 1
                    yield
        except SlicesExpired:
            self._table.version = ""
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
        # The answer as it comes, with its status: the library's own watch takes an empty one for the end of a watch.
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
    path.stat()
    return str(path)


async def _use_kubeconfig(file: str, configuration: Configuration) -> dict[str, Any]:
    """Take over what the current context of a file says, and return that context."""
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
