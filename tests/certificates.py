"""Certificates for tests, made by OpenSSL's command."""

import subprocess
from pathlib import Path


def certificate(folder: Path, *, name: str, days: int) -> Path:
    """A self-signed certificate and its key in one file."""
    key, request, signed, extra = (folder / each for each in ("key.pem", "request.pem", "cert.pem", "extra.cnf"))
    extra.write_text(f"subjectAltName={name}\n")
    for command in (
        ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key,
         "-subj", "/CN=engine", "-out", request],
        ["x509", "-req", "-in", request, "-signkey", key, "-days", str(days), "-extfile", extra, "-out", signed],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes(key.read_bytes() + signed.read_bytes())
    return both
