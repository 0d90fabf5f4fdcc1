"""The parts of deploy/compose/compose.yaml fit each other: names, ports, files, limits and times."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from gateway.config import Config
from gateway.config.file import load

FOLDER = Path("deploy/compose")
SCRAPE = Path("config/prometheus/scrape.yaml")
ENGINES = ("engine-a", "engine-b")
VARIABLE = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services, each variable at its default."""
    text = VARIABLE.sub(lambda match: match[1], (FOLDER / "compose.yaml").read_text())
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def replicas(section: str = "services") -> dict[str, Any]:
    """What compose-replicas.yaml adds to them."""
    text = VARIABLE.sub(lambda match: match[1], (FOLDER / "compose-replicas.yaml").read_text())
    added: dict[str, Any] = yaml.safe_load(text)[section]
    return added


@pytest.fixture(scope="module")
def config() -> Config:
    """The gateway's configuration."""
    return load(FOLDER / "gateway.yaml", [])


def flags(service: dict[str, Any]) -> dict[str, str]:
    """The flags of an engine's command."""
    words = (word.removeprefix("--").partition("=") for word in service["command"] if word.startswith("--"))
    return {name: value for name, _, value in words}


def seconds(duration: str) -> int:
    """A duration such as 630s."""
    assert duration.endswith("s")
    return int(duration.removesuffix("s"))


def test_the_gateways_backends_are_the_engines(services: dict[str, Any], config: Config) -> None:
    places = [(urlsplit(backend.url).hostname, str(urlsplit(backend.url).port)) for backend in config.backends]
    assert places == [(name, flags(services[name])["port"]) for name in ENGINES]


def test_gateway_and_engines_have_the_same_limit(services: dict[str, Any], config: Config) -> None:
    limits = {int(flags(services[name])["max-num-seqs"]) for name in ENGINES}
    assert limits == {backend.max_in_flight for backend in config.backends}


def test_the_limit_is_one_variable_of_all(monkeypatch: pytest.MonkeyPatch, services: dict[str, Any]) -> None:
    monkeypatch.setenv("MAX_NUM_SEQS", "77")
    assert {backend.max_in_flight for backend in load(FOLDER / "gateway.yaml", []).backends} == {77}
    assert "MAX_NUM_SEQS" in services["gateway"]["environment"]


def test_each_engine_has_a_gpu_of_its_own(services: dict[str, Any]) -> None:
    devices = [services[name]["deploy"]["resources"]["reservations"]["devices"] for name in ENGINES]
    assert [device["capabilities"] for (device,) in devices] == [["gpu"], ["gpu"]]
    assert len({device_id for (device,) in devices for device_id in device["device_ids"]}) == len(ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_engines_have_time_to_drain(services: dict[str, Any], name: str) -> None:
    assert seconds(services[name]["stop_grace_period"]) > int(flags(services[name])["shutdown-timeout"])


def test_the_gateway_has_time_to_drain_before_its_engines_stop(services: dict[str, Any], config: Config) -> None:
    drain_seconds = config.server.drain_delay_seconds + config.server.drain_timeout_seconds
    assert seconds(services["gateway"]["stop_grace_period"]) > drain_seconds
    assert set(services["gateway"]["depends_on"]) == set(ENGINES)


def test_published_ports_are_those_the_gateway_listens_on(services: dict[str, Any], config: Config) -> None:
    admin = config.server.admin
    assert admin is not None
    assert {config.server.host, admin.host} == {"0.0.0.0"}
    published = {entry.split(":")[-1]: entry for entry in services["gateway"]["ports"]}
    assert set(published) == {str(config.server.port), str(admin.port)}
    assert published[str(admin.port)].startswith("127.0.0.1:")


def test_prometheus_scrapes_every_server(services: dict[str, Any], config: Config) -> None:
    jobs = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    targets = {target for job in jobs for entry in job["static_configs"] for target in entry["targets"]}
    assert config.server.admin is not None
    engines = {f"{name}:{flags(services[name])['port']}" for name in ENGINES}
    assert targets == {f"gateway:{config.server.admin.port}", *engines}


def test_every_mounted_file_exists(services: dict[str, Any]) -> None:
    volumes = [entry.split(":")[0] for service in services.values() for entry in service.get("volumes", [])]
    files = [FOLDER / source for source in volumes if source.startswith(".")]
    assert len(files) == 6
    assert [file for file in files if not file.is_file()] == []
    build = services["gateway"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


def test_the_admin_port_answers_to_the_name_that_prometheus_scrapes() -> None:
    scraped = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    targets = [target for each in scraped for part in each["static_configs"] for target in part["targets"]]
    admin = load(FOLDER / "gateway.yaml", []).server.admin
    assert admin is not None
    assert f"gateway:{admin.port}" in targets
    assert "gateway" in admin.allowed_hosts


def test_two_gateways_share_the_same_engines_through_valkey(services: dict[str, Any], config: Config) -> None:
    replica = load(FOLDER / "gateway-replica.yaml", [])
    assert replica.backends == config.backends
    assert replica.coordination.address.hosts == (("valkey", 6379),)
    added = replicas()
    assert {*added} == {"valkey", "gateway", "gateway-b", "prometheus"}
    for name in ("gateway", "gateway-b"):
        assert "./gateway-replica.yaml:/etc/gateway/gateway.yaml:ro" in added[name]["volumes"]
        assert added[name]["build"]["args"] == {"EXTRAS": "coordination"}


def test_the_second_gateway_is_run_like_the_first_one(services: dict[str, Any]) -> None:
    first, second = services["gateway"], replicas()["gateway-b"]
    for name in ("read_only", "cap_drop", "security_opt", "ulimits", "healthcheck", "stop_grace_period", "restart"):
        assert second[name] == first[name], name


def test_prometheus_scrapes_the_second_gateway_too() -> None:
    jobs = {job["job_name"]: job for job in yaml.safe_load(SCRAPE.read_text())["scrape_configs"]}
    ((pattern,),) = [each["files"] for each in jobs["gateway"]["file_sd_configs"]]
    [mounted] = replicas()["prometheus"]["configs"]
    assert Path(mounted["target"]).match(f"/etc/prometheus/{pattern}")
    admin = load(FOLDER / "gateway-replica.yaml", []).server.admin
    assert admin is not None
    content = replicas("configs")[mounted["source"]]["content"]
    assert yaml.safe_load(content) == [{"targets": [f"gateway-b:{admin.port}"]}]
    assert {"gateway", "gateway-b"} <= {*admin.allowed_hosts}
