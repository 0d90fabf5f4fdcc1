"""Versions are read from where proxies are installed; what cannot be had says how it could be."""

from pathlib import Path

import pytest

from loadtest.compare.peers import PEERS, NotInstalled, arms_of, how, pip_install, python_for, version


def pretend_installed(peers_dir: Path, name: str, package: str, number: str) -> None:
    """What pip leaves behind."""
    (peers_dir / name / "lib/python3.12/site-packages" / f"{package}-{number}.dist-info").mkdir(parents=True)


def test_the_version_of_a_python_peer_is_read_from_its_environment(tmp_path: Path) -> None:
    pretend_installed(tmp_path, "vllm-router", "vllm_router", "0.1.17")
    pretend_installed(tmp_path, "production-stack", "vllm_router", "0.1.13")
    pretend_installed(tmp_path, "litellm", "litellm", "1.109.1")
    found = {name: version(tmp_path, PEERS[name]) for name in ("vllm-router", "production-stack", "litellm", "smg")}
    assert found == {"vllm-router": "0.1.17", "production-stack": "0.1.13", "litellm": "1.109.1", "smg": "unknown"}


def test_how_to_have_a_peer_depends_on_where_it_is_from() -> None:
    assert how(PEERS["smg"]) == "loadtest compare --install smg"
    assert how(PEERS["nginx"]) == "apt-get install nginx-light"
    assert "a checkout of vllm-project/production-stack" in how(PEERS["production-stack"])


def test_all_arms_are_listed_and_those_that_are_missing_say_how_to_have_them(tmp_path: Path) -> None:
    arms = {arm.name: arm for arm in arms_of([], PEERS, tmp_path, engines=2)}
    assert list(arms) == list(PEERS)
    assert not arms["gateway"].missing
    assert arms["sglang-router"].missing == "not installed: loadtest compare --install sglang-router"


def test_one_engine_is_an_arm_without_a_proxy_and_several_are_not(tmp_path: Path) -> None:
    assert arms_of([], PEERS, tmp_path, engines=1)[0].name == "direct"
    asked = arms_of(["gateway", "direct"], PEERS, tmp_path, engines=2)
    assert [arm.name for arm in asked] == ["gateway", "direct"]
    assert "added latency" in asked[1].missing


def test_a_name_that_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no proxy envoy; there are direct, gateway"):
        arms_of(["envoy"], PEERS, tmp_path, engines=2)
    with pytest.raises(ValueError, match="saved runs and series are compared by `loadtest report`"):
        arms_of([str(tmp_path)], PEERS, tmp_path, engines=2)


def test_a_peer_that_no_index_has_is_not_installed_without_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="production-stack=DIR"):
        pip_install(tmp_path, PEERS["production-stack"], lambda _: None)
    with pytest.raises(NotInstalled, match="apt-get install haproxy"):
        pip_install(tmp_path, PEERS["haproxy"], lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_is_new_enough_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 11, 7))
    stack = PEERS["production-stack"]
    assert python_for(stack, {"python3.13": "/usr/bin/python3.13"}.get) == "/usr/bin/python3.13"
    with pytest.raises(NotInstalled, match=r"needs Python 3\.12 or newer"):
        python_for(stack, {"python3.11": "/usr/bin/python3.11"}.get)
