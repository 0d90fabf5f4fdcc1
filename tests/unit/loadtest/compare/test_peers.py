"""Every proxy is started at the given address, before all of the given backends, by its best policy."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from gateway.config import file as config_file
from loadtest.compare.peers import PEERS, named, ours
from loadtest.compare.proxy import Setting

BACKENDS = ("http://127.0.0.1:9200", "http://127.0.0.1:9201", "http://127.0.0.1:9202")


def setting(folder: Path, max_num_seqs: int | None = None) -> Setting:
    return Setting(BACKENDS, 8100, metrics_port=8700, folder=folder, model="small", max_num_seqs=max_num_seqs)


def pretend_installed(peers_dir: Path, name: str, program: str) -> Path:
    path = peers_dir / name / "bin" / program
    path.parent.mkdir(parents=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("name", "program"), [("sglang-router", "python"), ("vllm-router", "vllm-router"), ("smg", "smg")]
)
def test_the_relatives_in_rust_route_by_cache_before_all_backends(name: str, program: str, tmp_path: Path) -> None:
    path = pretend_installed(tmp_path, name, program)
    command = PEERS[name].command(tmp_path, setting(tmp_path))
    assert command[0] == str(path)
    command_line = " ".join(command)
    assert "--host 127.0.0.1 --port 8100" in command_line
    assert f"--worker-urls {' '.join(BACKENDS)}" in command_line
    assert "--policy cache_aware" in command_line
    assert "--prometheus-host 127.0.0.1 --prometheus-port 8700" in command_line
    assert "--max-concurrent-requests 4096" in command_line


def test_production_stack_is_reported_a_model_for_each_backend(tmp_path: Path) -> None:
    pretend_installed(tmp_path, "production-stack", "vllm-router")
    command_line = " ".join(PEERS["production-stack"].command(tmp_path, setting(tmp_path)))
    assert f"--static-backends {','.join(BACKENDS)} --static-models small,small,small" in command_line
    assert "--routing-logic prefixaware" in command_line


def test_a_folder_of_vllm_router_is_not_taken_for_production_stack(tmp_path: Path) -> None:
    pretend_installed(tmp_path, "vllm-router", "vllm-router")
    assert PEERS["production-stack"].find(tmp_path) is None


def test_litellm_has_a_deployment_of_the_model_at_each_backend(tmp_path: Path) -> None:
    arguments = PEERS["litellm"].arguments(setting(tmp_path))
    config = yaml.safe_load(Path(arguments[arguments.index("--config") + 1]).read_text())
    assert [one["litellm_params"]["api_base"] for one in config["model_list"]] == [f"{url}/v1" for url in BACKENDS]
    assert {one["model_name"] for one in config["model_list"]} == {"small"}
    assert arguments[-4:-2] == ["--port", "8100"]


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_a_plain_proxy_reads_a_file_with_all_backends(name: str, tmp_path: Path) -> None:
    text = Path(PEERS[name].arguments(setting(tmp_path))[-1]).read_text()
    assert all(f"127.0.0.1:{port}" in text for port in (8100, 9200, 9201, 9202))
    assert "least" in text
    assert "{{" not in text
    assert not PEERS[name].routes_by_prefix


@pytest.mark.parametrize(("name", "flags"), [("nginx", ["-t"]), ("haproxy", ["-c"])])
def test_a_plain_proxy_accepts_its_file(name: str, flags: list[str], tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    command = PEERS[name].command(tmp_path, setting(tmp_path))
    command_line = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert command_line.returncode == 0, command_line.stderr


def test_ours_is_reported_addresses_backends_and_what_they_run_at_once(tmp_path: Path) -> None:
    *_, file = PEERS["gateway"].arguments(setting(tmp_path, max_num_seqs=16))
    found = config_file.load(Path(file), [])
    assert (found.server.port, found.server.admin and found.server.admin.port) == (8100, 8700)
    assert [(backend.url, backend.max_in_flight) for backend in found.backends] == [(url, 16) for url in BACKENDS]
    assert found.routing.policy == "prefix"


def test_an_operators_file_replaces_our_defaults_but_for_addresses_and_backends(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "server: {port: 1, access_log: false}\nbackends: [{url: http://x:1}]\nrouting: {policy: least_loaded}\n"
    )
    peer = ours(own)
    *_, file = peer.arguments(setting(tmp_path))
    found = config_file.load(Path(file), [])
    assert (found.server.port, found.server.access_log, found.routing.policy) == (8100, False, "least_loaded")
    assert [(backend.url, backend.max_in_flight) for backend in found.backends] == [(url, "auto") for url in BACKENDS]
    assert peer.policy == "as own.yaml says"


def test_names_choose_proxies_in_their_order_and_none_chooses_all() -> None:
    assert [peer.name for peer in named(["smg", "nginx"])] == ["smg", "nginx"]
    assert named([]) == list(PEERS.values())
    with pytest.raises(ValueError, match="no proxy envoy"):
        named(["envoy"])


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="sglang-router is not installed"):
        PEERS["sglang-router"].command(tmp_path, setting(tmp_path))


def test_versions_of_python_packages_are_pinned() -> None:
    packages = [peer.package for peer in PEERS.values() if peer.package and not peer.source]
    assert len(packages) == 5
    assert all(package.partition("==")[2] for package in packages)
