"""How EndpointSlices are listed and watched: the real client against an API server on loopback."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from gateway.core.backends.settings import DiscoveredBackend
from gateway.features.discovery.kubernetes import KubernetesEndpoints
from gateway.features.discovery.listings import DiscoveryError, Listing, first_listing
from gateway.features.discovery.settings import KubernetesDiscovery
from tests.certificates import certificate
from tests.kubernetes_api import NAMESPACE, ApiServer, endpoint_slice, event, pod, status

DEADLINE_SECONDS = 20.0


def source(server: ApiServer, folder: Path, token: str = "") -> KubernetesEndpoints:
    config = KubernetesDiscovery(service="vllm", kubeconfig=str(server.kubeconfig(folder, token)))
    return KubernetesEndpoints(config, DiscoveredBackend(), clock=lambda: 0.0)


class Followed:
    """The listings of a source; one that fails is started again at once by the next question."""

    def __init__(self, source: KubernetesEndpoints) -> None:
        self._source = source
        self._listings: AsyncGenerator[Listing, None] | None = None
        self.failures: list[str] = []

    async def until(self, *names: str) -> Listing:
        """The next listing that has exactly these backends."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                listing = await self.next()
                if listing is not None and [each.config.name for each in listing.backends] == sorted(names):
                    return listing

    async def next(self) -> Listing | None:
        """The next listing; None if the source failed."""
        self._listings = self._listings or self._source.listings()
        try:
            return await anext(self._listings)
        except DiscoveryError as error:
            self.failures.append(str(error))
            self._listings = None
            return None

    async def close(self) -> None:
        if self._listings is not None:
            await self._listings.aclose()


@asynccontextmanager
async def followed(source: KubernetesEndpoints) -> AsyncIterator[Followed]:
    made = Followed(source)
    try:
        yield made
    finally:
        await made.close()


async def watched(server: ApiServer, follower: Followed) -> asyncio.Task[Listing | None]:
    """Ask for the next listing, and wait until the watch is open that brings it."""
    asked = asyncio.get_running_loop().create_task(follower.next())
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not server.watching and not asked.done():
            await asyncio.sleep(0.001)
    return asked


def names(listing: Listing | None) -> list[str]:
    assert listing is not None
    return [each.config.name for each in listing.backends]


async def test_slices_are_listed_once_and_then_watched(tmp_path: Path) -> None:
    async with ApiServer() as server, followed(source(server, tmp_path)) as follower:
        server.put(endpoint_slice("vllm-1", pod("a")))
        assert names(await follower.next()) == ["a"]
        asked = await watched(server, follower)
        server.put(endpoint_slice("vllm-2", pod("b", "10.0.0.2")))
        assert names(await asked) == ["a", "b"]
        server.put(endpoint_slice("vllm-1", pod("a", terminating=True, ready=False)))
        assert names(await follower.next()) == ["b"]
        server.delete("vllm-2")
        assert names(await follower.next()) == []
        assert server.asked == ["list", "watch 101"]
        [listed, watch] = server.queries
        assert listed["labelSelector"] == watch["labelSelector"] == "kubernetes.io/service-name=vllm"
        assert (watch["allowWatchBookmarks"], watch["timeoutSeconds"]) == ("True", "60")
        assert {agent.partition("/")[0] for agent in server.agents} == {"vllm-batching-gateway"}


async def test_a_watch_that_ends_goes_on_at_the_last_version_bookmarks_included(tmp_path: Path) -> None:
    async with ApiServer() as server, followed(source(server, tmp_path)) as follower:
        server.put(endpoint_slice("vllm-1", pod("a")))
        await follower.next()
        asked = await watched(server, follower)
        version = server.bookmark()
        assert names(await asked) == ["a"]
        server.end_watches()
        assert names(await follower.next()) == ["a"]  # the watch has ended well
        asked = await watched(server, follower)
        assert server.asked == ["list", "watch 101", f"watch {version}"]
        server.cut()
        assert await asked is None
        server.put(endpoint_slice("vllm-2", pod("b", "10.0.0.2")))
        await follower.until("a", "b")
        assert server.asked == ["list", "watch 101", f"watch {version}", f"watch {version}"]
        assert len(follower.failures) == 1
        assert follower.failures[0].startswith("the API server cannot be reached: ")


async def test_an_event_that_is_cut_in_the_middle_comes_again(tmp_path: Path) -> None:
    async with ApiServer() as server, followed(source(server, tmp_path)) as follower:
        server.put(endpoint_slice("vllm-1", pod("a")))
        await follower.next()
        for cut in (server.cut, server.end_watches):
            asked = await watched(server, follower)
            server.sends(event("MODIFIED", endpoint_slice("vllm-1", pod("b")))[:40])
            await asyncio.sleep(0)
            cut()
            assert await asked is None
        server.put(endpoint_slice("vllm-1", pod("c")))
        await follower.until("c")
        assert server.asked == ["list", "watch 101", "watch 101", "watch 101"]
        assert "the API server closed the connection in the middle of an event" in follower.failures


@pytest.mark.parametrize("by", ["status", "event"])
async def test_slices_are_listed_again_when_the_server_has_forgotten_the_version(
    by: Literal["status", "event"], tmp_path: Path
) -> None:
    async with ApiServer() as server, followed(source(server, tmp_path)) as follower:
        server.says_gone_by = by
        server.put(endpoint_slice("vllm-1", pod("a")))
        server.put(endpoint_slice("vllm-2", pod("b", "10.0.0.2")))
        assert names(await follower.next()) == ["a", "b"]
        asked = await watched(server, follower)
        server.cut()
        assert await asked is None
        server.delete("vllm-1")
        server.forget()
        await follower.until("b")
        assert server.asked[:4] == ["list", "watch 102", "watch 102", "list"]
        asked = await watched(server, follower)
        server.put(endpoint_slice("vllm-2"))
        assert names(await asked) == []
        assert len(follower.failures) == 1  # of the cut


async def test_a_server_that_forgets_at_once_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    async with ApiServer() as server, followed(source(server, tmp_path)) as follower:
        await follower.next()
        asked = await watched(server, follower)
        server.sends(event("ERROR", status(410, "Expired", "too old")))
        assert await asked is None
        server.end_watches()
        await follower.next()
        asked = await watched(server, follower)
        server.end_watches()
        assert await asked is None
        assert follower.failures == [
            "the API server does not have the version that it has just listed", "the API server ended a watch at once",
        ]  # fmt: skip


async def test_a_token_that_has_expired_is_read_again(tmp_path: Path) -> None:
    async with ApiServer(token="first") as server, followed(source(server, tmp_path, token="first")) as follower:
        server.put(endpoint_slice("vllm-1", pod("a")))
        assert names(await follower.next()) == ["a"]
        asked = await watched(server, follower)
        server.token = "second"
        (tmp_path / "token").write_text("second\n")
        server.bookmark()
        assert names(await asked) == ["a"]
        server.end_watches()
        server.put(endpoint_slice("vllm-1", pod("b")))
        await follower.until("b")
        assert server.refused_tokens == ["first"]
        assert follower.failures == []
        asked = await watched(server, follower)
        server.token = "third"
        server.cut()
        assert await asked is None
        assert await follower.next() is None
        assert server.refused_tokens == ["first", "second", "second"]  # once more, and no more
        assert follower.failures[-1] == "the API server answered 401: Unauthorized"


async def test_what_the_server_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    async with ApiServer() as server:
        server.broken = 403
        with pytest.raises(DiscoveryError, match=r"^the API server answered 403: it is broken$"):
            await first_listing(source(server, tmp_path))
    with pytest.raises(DiscoveryError, match=r"^the API server cannot be reached: "):
        await first_listing(source(server, tmp_path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("a: [", "while parsing"),
        ("[]", "list indices"),
        ("{current-context: x, contexts: [], clusters: [], users: []}", "Expected object with name x in"),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used_is_named(text: str | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    if text is not None:
        file.write_text(text)
    config = KubernetesDiscovery(service="vllm", kubeconfig=str(file))
    with pytest.raises(DiscoveryError, match=f"^{file}: .*{reason}"):
        await first_listing(KubernetesEndpoints(config, DiscoveredBackend()))


async def test_outside_of_a_pod_a_kubeconfig_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(DiscoveryError, match=r"outside of Kubernetes, set kubeconfig\): Service host/port is not set"):
        await first_listing(KubernetesEndpoints(KubernetesDiscovery(service="vllm"), DiscoveredBackend()))


async def test_in_a_pod_its_service_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = certificate(tmp_path, name="IP:127.0.0.1", days=1)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(both)
    token, namespace = tmp_path / "token", tmp_path / "namespace"
    token.write_text("first")
    namespace.write_text(NAMESPACE)
    library = "kubernetes_asyncio.config.incluster_config"
    monkeypatch.setattr(f"{library}.SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(f"{library}.SERVICE_CERT_FILENAME", str(both))
    monkeypatch.setattr("gateway.features.discovery.kubernetes._NAMESPACE_FILE", namespace)
    async with ApiServer(token="first", tls=tls) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        server.put(endpoint_slice("vllm-1", pod("a")))
        found = KubernetesEndpoints(KubernetesDiscovery(selector="app in (vllm)"), DiscoveredBackend())
        async with followed(found) as follower:
            assert names(await follower.next()) == ["a"]
            assert server.queries[0]["labelSelector"] == "app in (vllm)"
            token.write_text("second")  # as the kubelet does before the first one expires
            server.token = "second"
            server.put(endpoint_slice("vllm-1", pod("b")))
            assert names(await follower.next()) == ["b"]
            assert (server.refused_tokens, follower.failures) == (["first"], [])
