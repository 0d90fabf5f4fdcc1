"""TLS settings: what is refused and how, and contexts that follow their files."""

import asyncio
import ssl
import threading
from pathlib import Path
from subprocess import run
from typing import Any
from unittest.mock import patch

import pytest

from gateway.config import ConfigError
from gateway.config.file import parse
from gateway.core.tls.contexts import BackendContexts, BackendTls, ServerContext, ServerTls, Stamp
from tests.certificates import certificate


def made(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return certificate(parent / name, name="IP:127.0.0.1", days=1)


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse({"backends": [{"url": "https://a:1"}], **sections})
    return str(caught.value)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    one, other, missing = made(tmp_path, "one"), made(tmp_path, "other"), tmp_path / "missing.pem"
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    key = str(other.parent / "key.pem")
    assert f"cannot use certificate {missing}: No such file" in refusal(server={"tls": {"certificate": str(missing)}})
    assert f"cannot use certificate {broken}: no PEM" in refusal(server={"tls": {"certificate": str(broken)}})
    tls = {"certificate": str(one), "key": key}
    assert f"cannot use certificate {one} with key {key}: key values mismatch" in refusal(server={"tls": tls})
    tls = {"certificate": str(one), "client_ca": str(broken)}
    assert f"cannot use CA certificates {broken}: " in refusal(server={"tls": tls})
    assert "key needs a certificate" in refusal(backends=[{"url": "https://a:1", "tls": {"key": key}}])
    assert "a:1 has tls, which is for https" in refusal(backends=[{"url": "http://a:1", "tls": {"ca": str(one)}}])
    assert "'10.0.0.0/99' is neither" in refusal(server={"trusted_proxies": ["10.0.0.0/99"]})
    assert "without a path" in refusal(server={"cors_origins": ["https://chat.example.com/"]})


def test_a_key_that_is_encrypted_is_refused_without_a_prompt(tmp_path: Path) -> None:
    file, key = made(tmp_path, "one"), tmp_path / "encrypted.pem"
    command = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", file.parent / "key.pem", "-out", key]
    run(command, check=True, capture_output=True)
    assert "cannot use certificate" in refusal(server={"tls": {"certificate": str(file), "key": str(key)}})


async def test_a_context_is_made_once_and_again_when_a_file_has_changed(tmp_path: Path) -> None:
    contexts, file = BackendContexts(), made(tmp_path, "one")
    config = BackendTls(ca=str(file))
    first = await contexts.of(config)
    assert await contexts.of(BackendTls(ca=str(file))) is first
    assert await contexts.of(None) is await contexts.of(None)
    file.write_bytes(made(tmp_path, "other").read_bytes())
    second = await contexts.of(config)
    assert second is not first
    file.unlink()
    with pytest.raises(OSError, match="cannot use CA certificates"):
        await contexts.of(config)


async def test_the_context_in_use_survives_files_that_do_not_match(tmp_path: Path) -> None:
    one, other = made(tmp_path, "one"), made(tmp_path, "other")
    pem, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    pem.write_bytes((one.parent / "cert.pem").read_bytes())
    key.write_bytes((one.parent / "key.pem").read_bytes())
    follower = ServerContext(ServerTls(certificate=str(pem), key=str(key)))
    pem.write_bytes((other.parent / "cert.pem").read_bytes())  # its key is written a moment later
    await follower.look()
    assert shown_by(follower.context) == der_of(one)
    key.write_bytes((other.parent / "key.pem").read_bytes())
    await follower.look()
    assert shown_by(follower.context) == der_of(other)


@pytest.mark.parametrize("is_known", [True, False])
async def test_files_that_hang_hold_up_no_one_else(tmp_path: Path, is_known: bool) -> None:
    """Nor a connection with what was read before."""
    file, may_end = made(tmp_path, "one"), threading.Event()

    def hang(*_: str) -> Stamp:
        may_end.wait()
        return ((2,),)

    contexts, config = BackendContexts(), BackendTls(ca=str(file))
    before = await contexts.of(config) if is_known else None
    follower = ServerContext(ServerTls(certificate=str(file)))
    with patch("gateway.core.tls.contexts._stamp", hang):
        looks = [asyncio.create_task(each) for each in (follower.look(), contexts.of(config))]
        if is_known:
            assert await looks[1] is before
        await asyncio.sleep(0)
        assert not looks[0].done()
        assert looks[1].done() == is_known
        may_end.set()
        await asyncio.gather(*looks)


def der_of(file: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert((file.parent / "cert.pem").read_text())


def shown_by(context: ssl.SSLContext) -> bytes:
    """The certificate that a client gets: a handshake in memory."""
    to_server, to_client, trusting = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server) * 2:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.getpeercert(binary_form=True) or b""
