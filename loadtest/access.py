"""Access to servers: the user's headers, and the trusted certificates.

None of it is ever recorded: values of headers are secrets, under any name.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
# The client frames its requests and reads answers as they are.
_OF_THE_CLIENT = ("accept-encoding", "connection", "content-length", "content-type", "expect", "transfer-encoding")


@dataclass(frozen=True, slots=True)
class Access:
    """Headers of every request by their lower-case names, and which certificates of servers are accepted."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    insecure: bool = False
    ca_file: Path | None = None

    @classmethod
    def of(
        cls, api_key: str | None, headers: Sequence[str] = (), *, insecure: bool = False, ca_file: Path | None = None
    ) -> Self:
        """From the options as they are typed. Raises ValueError."""
        found = {"authorization": f"Bearer {api_key}"} if api_key else {}
        for header in headers:
            name, value = _parsed(header)
            if name in found:
                other = " beside --api-key" if name == "authorization" and api_key else ""
                raise ValueError(f"--header {name}: give it once{other}")
            found[name] = value
        if insecure and ca_file is not None:
            raise ValueError("--insecure accepts every certificate: leave out --cacert")
        made = cls(found, insecure, ca_file)
        try:
            made.tls()
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"--cacert {ca_file}: not a file of PEM certificates: {error}") from None
        return made

    def tls(self) -> ssl.SSLContext:
        """Verifies servers' certificates by the file, or by the system's, or not at all."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def headers_of(self, page: str, target: str) -> dict[str, str]:
        """The headers for a page: the target's, if the page has its host and port, and none elsewhere."""
        return dict(self.headers) if _place(page) == _place(target) else {}


def certificate_hint(error: BaseException) -> str:
    """The remedy if an error is about a certificate; else empty."""
    is_certificate = "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(error, ssl.SSLCertVerificationError)
    return ". Trust its certificate with --cacert FILE, or any with --insecure" if is_certificate else ""


def _place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.rpartition("@")[2]


def _parsed(header: str) -> tuple[str, str]:
    name, colon, value = header.partition(":")
    name, value = name.strip().lower(), value.strip()
    if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        # The text after the name may be a secret.
        raise ValueError(f"--header {name if _NAME.fullmatch(name) and colon else '***'}: give NAME:VALUE on one line")
    if name in _OF_THE_CLIENT:
        raise ValueError(f"--header {name}: loadtest sets it itself")
    return name, value
