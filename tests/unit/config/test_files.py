"""What files named in the configuration may be: every kind of file that cannot be used, for every reader."""

import asyncio
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ConfigError
from gateway.config.file import load, of_environment
from gateway.core.tls.contexts import BackendTls, ServerTls
from gateway.features.coordination.settings import CoordinationConfig
from gateway.features.discovery.kubernetes import KubernetesEndpoints
from gateway.features.discovery.listings import DiscoveryError, first_listing
from gateway.features.discovery.settings import KubernetesDiscovery
from gateway.features.discovery.sources import WatchedFile
from gateway.features.keys.keys_file import read_keys
from gateway.files import MAX_CONFIG_BYTES, read_file

BOMB = "".join(f"k{at}: &k{at} [{', '.join([f'*k{at - 1}'] * 9) if at else 'x'}]\n" for at in range(11))


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def make_sparse(file: Path) -> None:
    with open(file, "wb") as out:
        out.truncate(1 << 30)


KINDS: dict[str, Callable[[Path], object]] = {
    "named pipe": make_pipe,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "1 GiB": make_sparse,
    "missing": Path.absolute,
    "empty": Path.touch,
    "no UTF-8": lambda file: file.write_bytes(b"\xff\xfe\xff"),
}
YAML: dict[str, str] = {
    "comment": "# all gone\n",
    "null": "null\n",
    "document without content": "---\n...\n",
    "aliases": BOMB,
    "alias of a text": "a: &x y\nb: *x\n",
    "merge key": "a: &x {b: 1}\nc:\n  <<: *x\n",
    "alias of itself": "&a [*a]\n",
    "deep list": "[" * 900 + "]" * 900,
    "deeper list": "[" * 100_000,
    "unknown tag": "!!python/object:os.system x\n",
}


def discovered(file: Path) -> None:
    try:
        asyncio.run(first_listing(WatchedFile(file)))
    except DiscoveryError as error:
        raise ConfigError(str(error)) from error


READERS: dict[str, Callable[[Path], Any]] = {
    "configuration": lambda file: load(file, environ={}),
    "keys": read_keys,
    "backends": discovered,
}


def certificate(file: Path) -> ServerTls:
    return ServerTls(certificate=str(file))


def context_of_redis(file: Path) -> Any:
    from gateway.features.coordination.connection import connected

    return asyncio.run(connected(CoordinationConfig(url="rediss://127.0.0.1:1", ca=str(file)), "name", lambda *_: None))


PEM_READERS: dict[str, Callable[[Path], Any]] = {
    "certificate": certificate,
    "authorities of clients": lambda file: ServerTls(certificate=str(CERTIFICATE), client_ca=str(file)),
    "authorities of backends": lambda file: BackendTls(ca=str(file)),
    "redis": context_of_redis,
}
CERTIFICATE = Path(ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_is_refused_at_once(reader: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    KINDS[kind](file)
    with pytest.raises(ConfigError, match=str(file)):
        READERS[reader](file)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", YAML.values(), ids=YAML.keys())
def test_yaml_that_has_nothing_or_too_much_is_refused(reader: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=str(file)):
        READERS[reader](file)


@pytest.mark.parametrize("reader", PEM_READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_certificates_are_regular_files(reader: str, kind: str, tmp_path: Path) -> None:
    from gateway.features.coordination.store import StoreLost

    file = tmp_path / "file.pem"
    KINDS[kind](file)
    with pytest.raises((ValueError, StoreLost)):
        PEM_READERS[reader](file)


@pytest.mark.parametrize("kind", ["named pipe", "device", "folder", "1 GiB", "missing"])
def test_a_kubeconfig_is_a_regular_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    KINDS[kind](file)
    from gateway.core.backends.settings import DiscoveredBackend

    source = KubernetesEndpoints(
        KubernetesDiscovery(service="vllm", port=8000, kubeconfig=str(file)), DiscoveredBackend()
    )
    with pytest.raises(DiscoveryError, match=str(file)):
        asyncio.run(first_listing(source))


def test_the_line_of_an_alias_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- &a {name: a}\n- name: b\n  previous:\n  - *a\n")
    with pytest.raises(ConfigError, match=rf"{file}:4: .*aliases"):
        read_keys(file)


def test_variables_are_no_way_around() -> None:
    with pytest.raises(ConfigError, match="GATEWAY_SERVER__PORT"):
        of_environment({"GATEWAY_SERVER__PORT": BOMB})


def test_an_empty_list_is_written_out(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("[]\n")
    assert read_keys(file) == ()
    assert asyncio.run(first_listing(WatchedFile(file))).backends == ()


def test_a_link_to_a_regular_file_is_one(tmp_path: Path) -> None:
    """As mounted volumes of Kubernetes have them."""
    (tmp_path / "target").write_bytes(b"x" * MAX_CONFIG_BYTES)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert len(read_file(tmp_path / "link", MAX_CONFIG_BYTES)) == MAX_CONFIG_BYTES
