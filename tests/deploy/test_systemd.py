"""The systemd units: valid, hardened, and fit for a restart that passes sockets on."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config import Config
from tests.deploy.conftest import ROOT

UNITS = [ROOT / "deploy/systemd/gateway.service", ROOT / "deploy/systemd/gateway.socket"]
MAX_EXPOSURE = "15"  # tenths of systemd's scale from 0 to 10; what is left is the network


class _Unit(configparser.RawConfigParser):
    """A unit file; keys that are repeated have their values in one."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    unit = _Unit(strict=False)
    unit.read(UNITS[0])
    return unit["Service"]


@pytest.fixture
def analyze(tmp_path: Path) -> list[str]:
    """The program, on copies of the units that name a command which is there."""
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed (apt-get install systemd)")
    for unit in UNITS:
        text = unit.read_text().replace("/opt/gateway/bin/gateway", str(Path(sys.executable).parent / "gateway"))
        (tmp_path / unit.name).write_text(text)
    return [program, *(str(tmp_path / unit.name) for unit in UNITS)]


def test_systemd_finds_no_fault_in_them(analyze: list[str]) -> None:
    program, *units = analyze
    done = subprocess.run([program, "verify", *units], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_fault_is_noticed(analyze: list[str]) -> None:
    program, unit, _ = analyze
    Path(unit).write_text(Path(unit).read_text() + "\n[Service]\nProtectHom=yes\n")
    assert "ProtectHom" in subprocess.run([program, "verify", unit], capture_output=True, text=True).stderr


def test_its_exposure_is_low(analyze: list[str]) -> None:
    program, unit, _ = analyze
    command = [program, "security", "--offline=true", "--no-pager", f"--threshold={MAX_EXPOSURE}", unit]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_may_do_what_a_restart_needs(service: configparser.SectionProxy) -> None:
    assert service["NotifyAccess"] == "all"  # the new process reports itself
    assert {"AF_INET", "AF_INET6", "AF_UNIX"} == {*service["RestrictAddressFamilies"].split()}
    assert service["KillMode"] == "mixed"
    assert "PrivateNetwork" not in service  # abstract sockets, and clients


def test_it_has_time_to_drain(service: configparser.SectionProxy) -> None:
    server = Config.model_validate({"backends": [{"url": "http://h:1"}]}).server
    assert int(service["TimeoutStopSec"]) > server.drain_delay_seconds + server.drain_timeout_seconds
