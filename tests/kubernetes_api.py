"""A Kubernetes API server on loopback with EndpointSlices that a test changes; lists and watches are those of the API.

Every change gets a version and is an event of all watches. A watch that begins gets the events since its version,
unless the server has forgotten them.
"""

import asyncio
import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import yaml
from aiohttp import web

Document = dict[str, Any]
SERVICE = "vllm"
NAMESPACE = "models"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
_KIND = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}


def pod(
    name: str,
    address: str = "127.0.0.1",
    *,
    ready: bool | None = True,
    terminating: bool = False,
    zone: str | None = "zone-a",
    uid: str | None = None,
) -> Document:
    """An endpoint as the EndpointSlice controller writes it."""
    found: Document = {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": ready, "terminating": terminating},
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": name, "uid": uid or f"uid-of-{name}"},
    }
    return found if zone is None else {**found, "zone": zone}


def endpoint_slice(
    name: str, *endpoints: Document, ports: Sequence[tuple[str, int]] = (("http", 8000),), family: str = "IPv4"
) -> Document:
    """A slice of the Service. One without endpoints has null, as the API writes it."""
    return {
        **_KIND,
        "metadata": {
            "name": name,
            "generateName": f"{SERVICE}-",
            "namespace": NAMESPACE,
            "labels": {
                "app": SERVICE,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": SERVICE,
            },
            "managedFields": [{"manager": "kube-controller-manager", "operation": "Update", "fieldsType": "FieldsV1"}],
        },
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": port, "port": number, "protocol": "TCP"} for port, number in ports] or None,
    }


def status(code: int, reason: str, message: str) -> Document:
    """What the API server says when it refuses a request."""
    kind = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**kind, "message": message, "reason": reason, "code": code}


def event(kind: str, subject: Document) -> bytes:
    """One line of a watch."""
    return json.dumps({"type": kind, "object": subject}).encode() + b"\n"


class ApiServer:
    """`async with ApiServer() as server:` listens. `token`: the only one that it takes; empty = any."""

    def __init__(self, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.token = token
        self.broken: int | None = None  # the status of all answers
        self.says_gone_by: Literal["status", "event"] = "status"
        self.asked: list[str] = []  # `list`, or `watch VERSION`
        self.refused_tokens: list[str] = []
        self.queries: list[dict[str, str]] = []
        self.agents: set[str] = set()
        self.port = 0
        self._tls = tls
        self._slices: dict[str, Document] = {}
        self._version = 100
        self._forgotten = 0  # the last version that is too old for a watch
        self._events: list[tuple[int, bytes]] = []
        self._watches: dict[asyncio.Queue[bytes | None], web.BaseRequest] = {}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, at the same port as before."""
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls)
        await site.start()
        self.port = cast(int, self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Refuse connections, and end those that are open."""
        if self._runner is not None:
            self.cut()
            await self._runner.cleanup()
            self._runner = None

    @property
    def watching(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    def put(self, document: Document) -> None:
        """Add a slice, or change the one of that name."""
        name = document["metadata"]["name"]
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._slices[name] = self._happens(kind, document)

    def delete(self, name: str) -> None:
        """Delete a slice."""
        self._happens("DELETED", self._slices.pop(name))

    def bookmark(self) -> str:
        """Send all watches the current version alone, after changes of other objects; gives that version."""
        self._version += 7
        empty = {"metadata": {"resourceVersion": str(self._version), "creationTimestamp": None}}
        self._tell(event("BOOKMARK", {**_KIND, **empty, "addressType": "", "endpoints": None, "ports": None}))
        return str(self._version)

    def forget(self) -> None:
        """From now on a watch of an older version is too late."""
        self._version += 1
        self._forgotten = self._version - 1

    def sends(self, line: bytes) -> None:
        """Send all watches these bytes."""
        self._tell(line)

    def end_watches(self) -> None:
        """End all watches in an orderly way."""
        for queue in self._watches:
            queue.put_nowait(None)

    def cut(self) -> None:
        """Lose the connections of all watches."""
        for request in self._watches.values():
            if request.transport is not None:
                request.transport.abort()

    def kubeconfig(self, folder: Path, token: str = "") -> Path:
        """A kubeconfig that points here; the token is in a file of its own beside it."""
        token_file = folder / "token"
        token_file.write_text(f"{token}\n")
        file = folder / "kubeconfig"
        cluster = {"server": f"http://127.0.0.1:{self.port}"}
        context = {"cluster": "one", "user": "gateway", "namespace": NAMESPACE}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "one", "cluster": cluster}],
            "contexts": [{"name": "here", "context": context}],
            "users": [{"name": "gateway", "user": {"tokenFile": str(token_file)} if token else {}}],
        }
        file.write_text(yaml.safe_dump(document))
        return file

    def _happens(self, kind: str, document: Document) -> Document:
        self._version += 1
        metadata = {**document["metadata"], "resourceVersion": str(self._version)}
        document = {**document, "metadata": metadata}
        line = event(kind, document)
        self._events.append((self._version, line))
        self._tell(line)
        return document

    def _tell(self, line: bytes) -> None:
        for queue in self._watches:
            queue.put_nowait(line)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.broken is not None:
            return web.json_response(status(self.broken, "Broken", "it is broken"), status=self.broken)
        if self.token and token != self.token:
            self.refused_tokens.append(token)
            return web.json_response(status(401, "Unauthorized", "Unauthorized"), status=401)
        self.queries.append(dict(request.query))
        self.agents.add(request.headers.get("User-Agent", ""))
        if request.query.get("watch", "").lower() == "true":
            return await self._watch(request)
        self.asked.append("list")
        kind = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({**kind, "metadata": metadata, "items": list(self._slices.values())})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        self.asked.append(f"watch {version}")
        gone = status(410, "Expired", f"too old resource version: {version} ({self._version})")
        if version < self._forgotten and self.says_gone_by == "status":
            return web.json_response(gone, status=410)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if version < self._forgotten:
            await response.write(event("ERROR", gone))
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for at, line in self._events:
            if at > version:
                queue.put_nowait(line)
        self._watches[queue] = request
        try:
            while (line := await queue.get()) is not None:
                await response.write(line)
        except ConnectionError:
            pass
        finally:
            del self._watches[queue]
        return response
