"""Sources that are polled: a watched file, and a name in DNS."""

import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from gateway.config import ConfigError
from gateway.config.errors import Mistake, mistakes
from gateway.config.file import YamlFile
from gateway.core.backends.fleet import Wanted
from gateway.core.backends.settings import BackendConfig, DiscoveredBackend
from gateway.core.threads import Threads
from gateway.core.turns import Steps, in_turns
from gateway.features.discovery.listings import DiscoveryError, Listing, polled
from gateway.features.discovery.settings import DnsDiscovery
from gateway.files import MAX_LISTING_BYTES, version_of

if TYPE_CHECKING:
    import dns.asyncresolver

_FILE_SECONDS = 1.0
_MOST_SECONDS, _LEAST_SECONDS = 30.0, 1.0  # between two questions, for any TTL
_TIMEOUT_SECONDS = 5.0
_MADE_AT_ONCE = 128
_BACKENDS = TypeAdapter(tuple[BackendConfig, ...])


class WatchedFile:
    """A file with a list of backends, as in the configuration. It is read again when it has changed."""

    def __init__(self, file: Path) -> None:
        self.name = f"file {file}"
        self._file = file
        self._threads = Threads(self.name)
        self._version: tuple[int, ...] = ()
        self._listing = Listing(())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WatchedFile) and other._file == self._file

    def __hash__(self) -> int:
        return hash(self._file)

    def listings(self) -> AsyncGenerator[Listing, None]:
        return polled(self.read)

    async def read(self) -> tuple[Listing, float]:
        """The listing in the file, and the seconds until the next check. Raises DiscoveryError."""
        await self._threads.run(self._read)
        return self._listing, _FILE_SECONDS

    def _read(self) -> None:
        try:
            version = version_of(self._file)
            if version == self._version:
                return
            read = YamlFile(self._file, os.environ, MAX_LISTING_BYTES)
        except OSError as error:
            raise DiscoveryError(f"{self._file}: {error}") from error
        except ConfigError as error:
            raise DiscoveryError(str(error)) from error
        backends, found = tuple[BackendConfig, ...](), list[Mistake]()
        try:
            backends = _BACKENDS.validate_python(read.document)
        except ValidationError as error:
            found = mistakes(error, within=("backends",))
        if complaints := read.complaints(found):
            raise DiscoveryError(complaints)
        self._version, self._listing = version, Listing(tuple(map(Wanted, backends)))


class DnsName:
    """Every address of a name is a backend: its A and AAAA records, or the hosts and ports of its SRV records."""

    def __init__(self, config: DnsDiscovery, settings: DiscoveredBackend) -> None:
        self.name = f"dns {config.name}" + (f":{config.port}" if config.port else "")
        self._config = config
        self._settings = settings.model_dump(exclude_defaults=True)
        self._resolver: dns.asyncresolver.Resolver | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DnsName) and (other._config, other._settings) == (self._config, self._settings)

    def __hash__(self) -> int:
        return hash(self._config)

    def listings(self) -> AsyncGenerator[Listing, None]:
        return polled(self.read)

    async def read(self) -> tuple[Listing, float]:
        """The backends at the name's addresses, and the seconds that they are valid. Raises DiscoveryError."""
        import dns.exception

        resolver = self._resolver = self._resolver or self._new_resolver()
        config = self._config
        try:
            if config.record == "srv":
                addresses, seconds = await self._services(resolver)
            else:
                addresses, seconds = await self._addresses(resolver, config.name)
                addresses = [f"{host}:{config.port}" for host in addresses]
            scheme = "https" if config.tls else "http"
            urls = [f"{scheme}://{address}" for address in sorted(set(addresses))]
            found = await in_turns(self._made(urls))
        except (dns.exception.DNSException, OSError, ValidationError) as error:
            raise DiscoveryError(f"{config.name}: {error}") from error
        return Listing(tuple(found)), min(_MOST_SECONDS, max(_LEAST_SECONDS, seconds))

    def _made(self, urls: list[str]) -> Steps[list[Wanted]]:
        """The backends; an answer may have thousands of addresses. Raises ValidationError."""
        found = list[Wanted]()
        for url in urls:
            if len(found) % _MADE_AT_ONCE == _MADE_AT_ONCE - 1:
                yield
            found.append(Wanted(BackendConfig(url=url, **self._settings)))
        return found

    def _new_resolver(self) -> "dns.asyncresolver.Resolver":
        import dns.asyncresolver

        nameserver = self._config.nameserver
        resolver = dns.asyncresolver.Resolver(configure=not nameserver)
        if nameserver:
            host, _, port = nameserver.rpartition(":")
            resolver.nameservers, resolver.port = [host.strip("[]")], int(port)
        return resolver

    async def _services(self, resolver: "dns.asyncresolver.Resolver") -> tuple[list[str], float]:
        """host:port of each SRV record; a host with several addresses is several backends."""
        answer = await resolver.resolve(self._config.name, "SRV", lifetime=_TIMEOUT_SECONDS, search=False)
        seconds, addresses = float(answer.rrset.ttl if answer.rrset else 0), list[str]()
        for record in answer:
            hosts, ttl = await self._addresses(resolver, record.target.to_text(omit_final_dot=True))
            addresses += [f"{host}:{record.port}" for host in hosts]
            seconds = min(seconds, ttl)
        return addresses, seconds

    async def _addresses(self, resolver: "dns.asyncresolver.Resolver", name: str) -> tuple[list[str], float]:
        """The IPv4 and IPv6 addresses of a name, and their shortest TTL. Raises DNSException if there is none."""
        import dns.resolver

        found, seconds = list[str](), float("inf")
        for kind in ("A", "AAAA"):
            try:
                answer = await resolver.resolve(name, kind, lifetime=_TIMEOUT_SECONDS, search=False)
            except dns.resolver.NoAnswer:
                if kind == "AAAA" and not found:
                    raise
                continue
            seconds = min(seconds, answer.rrset.ttl if answer.rrset else 0)
            found += [f"[{each.address}]" if kind == "AAAA" else str(each.address) for each in answer]
        return found, seconds
