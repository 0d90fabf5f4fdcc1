"""What a source of backends lists: a file, or a name in DNS on real sockets."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import dns.rcode
import pytest

from gateway.config import ConfigError
from gateway.config.file import parse
from gateway.core.backends.settings import BackendConfig, DiscoveredBackend
from gateway.features.discovery.follow import configured_sources
from gateway.features.discovery.listings import DiscoveryError, first_listing
from gateway.features.discovery.settings import DnsDiscovery
from gateway.features.discovery.several_addresses import several_addresses
from gateway.features.discovery.sources import DnsName, WatchedFile
from tests.dns import NameServer


async def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKEND_KEY", "sk-1")
    file = tmp_path / "backends.yaml"
    source = WatchedFile(file)
    with pytest.raises(DiscoveryError, match="No such file"):
        await source.read()
    file.write_text("- url: http://a:1\n  api_key: ${BACKEND_KEY}\n- {url: http://b:1, name: b}\n")
    listing, seconds = await source.read()
    assert [(each.config.name, each.config.api_key) for each in listing.backends] == [("a:1", "sk-1"), ("b", "")]
    assert seconds == 1.0
    assert (await source.read())[0] is listing
    file.write_text("[]")
    assert (await first_listing(source)).backends == ()


async def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "backends.yaml"
    file.write_text("- url: http://a:1\n- url: ftp://nonsense\n")
    with pytest.raises(DiscoveryError, match=r"backends\.yaml:2: 1\.url: must look like http://host:port"):
        await WatchedFile(file).read()
    file.write_text("- url: ${NOT_SET}")
    with pytest.raises(DiscoveryError, match="NOT_SET is not set"):
        await WatchedFile(file).read()
    file.write_text("a: [")
    with pytest.raises(DiscoveryError, match=r"backends\.yaml"):
        await WatchedFile(file).read()


def dns_name(server: NameServer, **settings: object) -> DnsName:
    config = DnsDiscovery.model_validate({"name": "vllm.example", "nameserver": server.address, **settings})
    return DnsName(config, DiscoveredBackend(max_in_flight=7))


async def read(source: DnsName) -> tuple[list[BackendConfig], float]:
    listing, seconds = await source.read()
    return [each.config for each in listing.backends], seconds


async def test_every_address_of_a_name_is_a_backend() -> None:
    async with NameServer() as server:
        source = dns_name(server, port=8000)
        server.records["vllm.example", "A"] = ["10.0.0.2", "10.0.0.1"]
        server.records["vllm.example", "AAAA"] = ["fd00::1"]
        server.ttl_seconds = 12
        backends, seconds = await read(source)
        assert [each.url for each in backends] == [
            "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000",
        ]  # fmt: skip
        assert {each.max_in_flight for each in backends} == {7}
        assert seconds == 12.0
        server.records = {("vllm.example", "A"): ["10.0.0.3"]}
        for ttl_seconds, expected in ((0, 1.0), (3600, 30.0)):
            server.ttl_seconds = ttl_seconds
            backends, seconds = await read(source)
            assert ([each.name for each in backends], seconds) == (["10.0.0.3:8000"], expected)


async def test_srv_records_have_hosts_and_ports() -> None:
    async with NameServer() as server:
        server.ttl_seconds = 5
        server.records["vllm.example", "SRV"] = ["0 0 8001 a.vllm.example.", "0 0 8002 b.vllm.example."]
        server.records["a.vllm.example", "A"] = ["10.0.0.1"]
        server.records["b.vllm.example", "A"] = ["10.0.0.2"]
        backends, seconds = await read(dns_name(server, record="srv", tls=True))
        assert [each.url for each in backends] == ["https://10.0.0.1:8001", "https://10.0.0.2:8002"]
        assert seconds == 5.0


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN, dns.rcode.REFUSED, dns.rcode.NOERROR])
async def test_a_name_without_an_answer_is_an_error(rcode: dns.rcode.Rcode) -> None:
    async with NameServer() as server:
        server.rcode = rcode
        with pytest.raises(DiscoveryError, match=r"^vllm\.example: "):
            await first_listing(dns_name(server, port=8000))


def test_the_sources_are_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {
        "file": "backends.yaml",
        "dns": [{"name": "vllm.example", "port": 8000}, {"name": "vllm.example", "port": 8001}],
        "kubernetes": [
            {"service": "vllm"},
            {"service": "vllm", "namespace": "models", "port": "8001", "zone": "a"},
            {"selector": "app=vllm", "port": "http", "kubeconfig": "other"},
        ],
    }
    config = parse({"discovery": sections})
    assert [each.name for each in configured_sources(config.discovery)] == [
        "file backends.yaml", "dns vllm.example:8000", "dns vllm.example:8001",
        "kubernetes vllm", "kubernetes models/vllm:8001, zone a", "kubernetes (app=vllm):http, kubeconfig other",
    ]  # fmt: skip
    assert configured_sources(config.discovery) == configured_sources(parse({"discovery": sections}).discovery)
    monkeypatch.setattr("gateway.settings.find_spec", lambda _: None)
    for key, extra in (("dns", "discovery"), ("kubernetes", "kubernetes")):
        with pytest.raises(ConfigError, match=rf"discovery\.{key}\.0: .*vllm-batching-gateway\[{extra}\]"):
            parse({"discovery": {key: sections[key]}})


def test_a_gateway_without_kubernetes_does_not_import_its_client() -> None:
    code = "import sys, gateway.app; sys.exit('kubernetes_asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "set either service or selector"),
        ({"service": "vllm", "selector": "app=vllm"}, "set either service or selector"),
        ({"service": "VLLM"}, r"kubernetes\.0\.service: "),
        ({"service": "vllm", "namespace": "a/b"}, r"kubernetes\.0\.namespace: "),
        ({"selector": "app="}, None),
        ({"selector": "app in (vllm, vllm-canary),!old, tier!=test"}, None),
        ({"selector": "app=vllm&watch=false"}, "must be a label selector"),
        ({"selector": "app in vllm"}, "must be a label selector"),
        ({"service": "vllm", "port": 0}, r"port: must be a number from 1 to 65535, or a name"),
        ({"service": "vllm", "port": "65536"}, r"port: must be a number from 1 to 65535, or a name"),
        ({"service": "vllm", "port": "HTTP"}, r"port: must be a number from 1 to 65535, or a name"),
        ({"service": "vllm", "pod": "a"}, "unknown key"),
    ],
)
def test_mistakes_in_a_kubernetes_source_are_named(wrong: dict[str, object], message: str | None) -> None:
    document = {"discovery": {"kubernetes": [wrong]}}
    if message is None:
        parse(document)
    else:
        with pytest.raises(ConfigError, match=message):
            parse(document)


def test_a_kubernetes_source_is_listed_once() -> None:
    with pytest.raises(ConfigError, match="two entries are the same"):
        parse({"discovery": {"kubernetes": [{"service": "vllm"}, {"service": "vllm", "tls": False}]}})


@pytest.mark.parametrize("wrong", [{"name": "a"}, {"name": "a", "record": "srv", "port": 1}])
def test_a_port_is_given_once(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="set port for"):
        parse({"discovery": {"dns": [wrong]}})


async def test_a_url_whose_host_has_several_addresses_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host == "nowhere":
            raise socket.gaierror
        count = 3 if host == "many" else 1
        both = [socket.AF_INET] * count + [socket.AF_INET6]
        return [(family, 1, 6, "", (f"10.0.0.{number}", port)) for number, family in enumerate(both)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    urls = ("http://many:8000", "http://one:8000", "http://nowhere:8000")
    [warning] = await several_addresses([BackendConfig(url=url) for url in urls])
    assert "discovery.kubernetes" in warning
    assert warning.startswith("http://many:8000 has 3 addresses, but counts as one backend")
