"""The settings of TLS, for the client port and for backends, and the contexts made of them.

Certificates are renewed by other programs: a file that changes counts for the connections made from then on. Threads
read them, as a network file system may hang.
"""

import asyncio
import ssl
from pathlib import Path
from typing import Self

import structlog
from pydantic import Field, model_validator

from gateway.core.threads import Threads
from gateway.files import check_pem, version_of
from gateway.settings import Section, default

_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 0.5  # of a connection, with files that hang

Stamp = tuple[tuple[int, ...], ...]
"""The version of each file; empty = it cannot be seen."""


def _stamp(*files: str) -> Stamp:
    found: list[tuple[int, ...]] = []
    for file in files:
        try:
            found.append(version_of(Path(file)))
        except OSError:
            found.append(())
    return tuple(found)


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Raises ValueError that names the files."""
    try:
        key_file = check_pem(key) if key else None
        context.load_cert_chain(check_pem(certificate), key_file, password="")  # else OpenSSL prompts on the terminal
    except (OSError, ValueError) as error:
        with_key = f" with key {key}" if key else ""
        raise ValueError(f"cannot use certificate {certificate}{with_key}: {_reason(error)}") from error


def _load_authorities(context: ssl.SSLContext, file: str) -> None:
    """Raises ValueError that names the file."""
    try:
        context.load_verify_locations(check_pem(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot use CA certificates {file}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "").lower().replace("_", " ") or "no PEM, or an encrypted key"
    return getattr(error, "strerror", None) or str(error)


class ServerTls(Section):
    """The certificate of the client port. Its files are read again when they change."""

    certificate: str = Field(description="Path of the certificate with its chain (PEM).")
    key: str = default("", "Path of its private key (PEM, not encrypted); empty = in the same file.")
    client_ca: str = default(
        "", "Path of CA certificates (PEM) that must have signed the certificates of clients; empty = none needed."
    )

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """Raises ValueError that names a file."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        _load_certificate(context, self.certificate, self.key)
        if self.client_ca:
            _load_authorities(context, self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def stamp(self) -> Stamp:
        return _stamp(self.certificate, *filter(None, (self.key, self.client_ca)))


class ServerContext:
    """The client port's `context`, which follows its files."""

    def __init__(self, config: ServerTls) -> None:
        self.context = config.context()
        self._config = config
        self._stamp = config.stamp()
        self._threads = Threads("certificate")

    async def step(self) -> None:
        """Wait, and read the files if one has changed. If they cannot be used, the former ones stay."""
        await asyncio.sleep(_LOOK_SECONDS)
        await self.look()

    async def look(self) -> None:
        """Read the files if one has changed."""
        await self._threads.run(self._read)

    def _read(self) -> None:
        stamp = self._config.stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        log = structlog.get_logger("gateway")
        try:
            self.context = self._config.context()
        except ValueError as error:
            log.warning("certificate_not_read", problem=str(error))
        else:
            log.info("certificate_read", certificate=self._config.certificate)


class BackendTls(Section):
    """The CAs that a backend is verified by, and the client certificate. Needs an https URL."""

    ca: str = default("", "Path of CA certificates (PEM) to trust; empty = those of the system.")
    certificate: str = default("", "Path of a client certificate with its chain (PEM); empty = none.")
    key: str = default("", "Path of its private key (PEM, not encrypted); empty = in the same file.")
    server_name: str = default("", "Name that the backend's certificate must have; empty = the host of `url`.")

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        if self.key and not self.certificate:
            raise ValueError("key needs a certificate")
        if self.ca or self.certificate:
            self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """Raises ValueError that names a file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if self.ca else ssl.create_default_context()
        if self.ca:
            _load_authorities(context, self.ca)
        if self.certificate:
            _load_certificate(context, self.certificate, self.key)
        return context

    def stamp(self) -> Stamp:
        return _stamp(*filter(None, (self.ca, self.certificate, self.key)))


_OF_THE_SYSTEM = BackendTls()


class BackendContexts:
    """The contexts of backends: made when they are first needed, and again when a file has changed."""

    def __init__(self) -> None:
        self._made: dict[BackendTls, tuple[Stamp, ssl.SSLContext]] = {}
        self._threads = Threads("backend_certificates")

    async def of(self, config: BackendTls | None) -> ssl.SSLContext:
        """Raises OSError with the name of a file that has become unusable. The loaded files stay while reads hang."""
        config = config or _OF_THE_SYSTEM
        made = self._made.get(config)
        if made is not None and not made[0]:  # no file can change
            return made[1]
        try:
            async with asyncio.timeout(None if made is None else _PATIENCE_SECONDS):
                made = self._made[config] = await self._threads.run(_current, config, made)
        except TimeoutError:
            assert made is not None
        except ValueError as error:
            raise OSError(str(error)) from error
        return made[1]

    async def options(self, config: BackendTls | None) -> tuple[ssl.SSLContext, str | None]:
        """The context, and the name that the certificate must have; None = the host's. Raises OSError."""
        return await self.of(config), (config.server_name or None) if config is not None else None


def _current(config: BackendTls, made: tuple[Stamp, ssl.SSLContext] | None) -> tuple[Stamp, ssl.SSLContext]:
    """The cached context, or a new one if a file has changed. Raises ValueError."""
    stamp = config.stamp()
    return made if made is not None and made[0] == stamp else (stamp, config.context())
