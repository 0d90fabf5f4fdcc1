"""Which engines stand behind the servers that are driven: named by the user, or told by a gateway's admin port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loadtest.checkpoint.asking import get_text, open_asker
from loadtest.checkpoint.document import Role, Server
from loadtest.checkpoint.serving import look


@dataclass(frozen=True, slots=True)
class Neighbours:
    """All servers of a run by name, as they were before it; pages of metrics that tell what engines did."""

    servers: Mapping[str, Server]
    pages: Mapping[str, str] = field(default_factory=dict)

    def pages_behind(self, driven: str) -> dict[str, str]:
        """Pages of metrics of all engines, and of the admin port of the gateway of that name."""
        others = {name for name, server in self.servers.items() if server.role is not Role.ENGINE and name != driven}
        return {name or "gateway": url for name, url in self.pages.items() if name not in others}

    def around(self, driven: str) -> list[Server]:
        """The server of that name, and all engines and no other gateway."""
        return [
            server.model_copy(update={"driven": name == driven})
            for name, server in self.servers.items()
            if name == driven or server.role is Role.ENGINE
        ]


async def neighbours(
    targets: Mapping[str, str], engines: Mapping[str, str], admin_url: str | None, api_key: str | None
) -> Neighbours:
    """Asks all targets what they are, and gateways who is behind them. An engine has one name, be it driven or not."""
    found: dict[str, Server] = {}
    async with open_asker(api_key) as session:
        for name, url in targets.items():
            found[name] = await look(session, name, url, driven=True, named=True, admin_url=admin_url or "")
        for name, url in engines.items():
            if not _known(found, url):
                found[name] = await look(session, name, url, driven=False, named=True)
        for gateway in [server for server in found.values() if server.backends]:
            for backend in gateway.backends:
                url = str(backend.get("url") or f"http://{backend['name']}")
                if not _known(found, url):
                    name = str(backend["name"])
                    found[name] = await look(session, name, url, driven=False, named=False)
        pages = {name: f"{server.url}/metrics" for name, server in found.items() if server.role is Role.ENGINE}
        for name, server in found.items():
            page = f"{server.admin_url}/metrics"
            if server.admin_url and server.role is Role.GATEWAY and await get_text(session, page) is not None:
                pages[name] = page
    return Neighbours(found, pages)


def _known(found: Mapping[str, Server], url: str) -> bool:
    return any(server.url == url.rstrip("/") for server in found.values())
