"""What the image holds and declares."""

import json
import stat
import sys
from pathlib import Path

import pytest

from gateway import __version__
from tests.image import host
from tests.image.build import ROOT, output
from tests.image.container import Image, Runtime
from tests.image.lock import LOCKS, entries

MAX_ADDED_BYTES = 145_000_000  # of which numpy is half
MAX_PACKAGES = 35  # each is something to keep up to date
BUILD_TOOLS = ("cc", "gcc", "g++", "make", "git", "ld", "as")
INSTALLERS = ("pip", "setuptools", "hatchling", "wheel")


def files_below(folder: Path) -> list[tuple[Path, int, int, int]]:
    """Each regular file and folder with its mode, owner and group."""
    found = [(path, path.lstat()) for path in folder.rglob("*")]
    return [
        (path, status.st_mode, status.st_uid, status.st_gid)
        for path, status in found
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    ]


def test_its_user_is_a_number_and_owns_nothing_in_it(image: Image) -> None:
    user, group = (int(part) for part in image.config["User"].split(":"))
    assert user > 0
    assert group > 0
    assert [path for path, _, owner, its_group in files_below(image.root) if owner == user or its_group == group] == []


def test_nobody_but_root_can_change_what_is_installed(image: Image) -> None:
    files = [entry for folder in ("opt", "usr", "etc") for entry in files_below(image.root / folder)]
    assert len(files) > 1000
    assert [path for path, mode, *_ in files if mode & stat.S_IWOTH] == []


def test_it_declares_its_ports_command_signal_and_health_check(image: Image) -> None:
    config = image.config
    assert set(config["ExposedPorts"]) == {"8080/tcp", "8081/tcp", "8082/tcp"}
    assert (config["Entrypoint"], config["Cmd"]) == (["gateway"], ["serve", "-c", "/etc/gateway/gateway.yaml"])
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", "gateway", "healthcheck", "-c", "/etc/gateway/gateway.yaml"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__


def test_it_has_nothing_that_builds_installs_or_drives_load(image: Image) -> None:
    folders = [image.root / folder for folder in ("usr/bin", "usr/local/bin", "opt/gateway/bin")]
    assert [folder / tool for folder in folders for tool in BUILD_TOOLS if (folder / tool).exists()] == []
    (packages,) = (image.root / "opt/gateway/lib").glob("python3.*/site-packages")
    assert (packages / "gateway/cli/plan.jinja").is_file()
    assert [name for name in INSTALLERS if (packages / name).exists()] == []
    assert not (packages / "loadtest").exists()
    assert not (image.root / "opt/gateway/bin/loadtest").exists()
    assert sorted(path.name for path in (image.root / "opt").iterdir()) == ["bytecode", "gateway"]
    assert not (image.root / "src").exists()


def test_its_bill_of_materials_lists_what_is_installed_at_the_locked_versions(image: Image) -> None:
    bill = json.loads((image.root / "opt/gateway/sbom.cdx.json").read_text())
    listed = {each["name"].lower().replace("_", "-"): each["version"] for each in bill["components"]}
    (packages,) = (image.root / "opt/gateway/lib").glob("python3.*/site-packages")
    assert len(listed) == len(list(packages.glob("*.dist-info")))
    assert listed.pop("vllm-batching-gateway") == __version__
    locked = {name: "".join(pins) for name, pins in entries((LOCKS / "base.lock").read_text()).items()}
    assert all(f"=={version} " in locked[name] for name, version in listed.items())
    assert len(listed) < MAX_PACKAGES


def test_it_tells_nothing_of_the_machine_that_built_it(image: Image) -> None:
    settings = host.pip_settings(output([sys.executable, "-m", "pip", "config", "list"]))
    places = [word for value in settings.values() for word in value.split() if "/" in word]
    described = json.dumps(image.described)
    assert [word for word in [*places, str(ROOT)] if word in described] == []
    assert not (image.root / "etc/pip.conf").exists()
    assert list((image.root / "run").rglob("pip.conf")) == []
    assert list((image.root / "opt").rglob("direct_url.json")) == []


def test_the_gateway_adds_little_to_its_base(image: Image) -> None:
    added = sum(path.lstat().st_size for path in (image.root / "opt").rglob("*") if path.is_file())
    assert 10_000_000 < added < MAX_ADDED_BYTES


def test_it_runs_as_a_user_without_rights_on_a_file_system_it_cannot_write(containers: Runtime) -> None:
    code = (
        "import os, json\n"
        "def refusal(path):\n"
        "    try: open(path, 'w')\n"
        "    except OSError as error: return error.strerror\n"
        "print(json.dumps([os.getuid(), os.getpid(), *map(refusal, ('/tmp/x', '/opt/gateway/x', '/x'))]))"
    )
    done = containers.run(["python", "-c", code])
    assert json.loads(done.stdout) == [10001, 1, *["Read-only file system"] * 3], done.stderr


def test_everything_it_imports_is_compiled(containers: Runtime) -> None:
    code = (
        "import gateway.__main__, gateway.app, gateway.cli.check, gateway.cli.client, gateway.cli.pages\n"
        "import json, os, sys\n"
        "cached = {name: getattr(module, '__cached__', None) for name, module in sys.modules.items()}\n"
        "print(json.dumps([len(cached), [name for name, file in cached.items() if file and not os.path.exists(file)]]))"
    )
    done = containers.run(["python", "-c", code])
    number, missing = json.loads(done.stdout)
    assert number > 500
    assert missing == []


def test_the_gateway_is_imported_from_where_it_is_installed(containers: Runtime) -> None:
    done = containers.run(["python", "-c", "import gateway; print(gateway.__file__)"])
    assert done.stdout.startswith("/opt/gateway/lib/"), done.stderr


def test_it_prints_its_version_and_runs_compiled(containers: Runtime) -> None:
    done = containers.run(["gateway", "--version"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"vllm-batching-gateway {__version__} (compiled, Python ")


@pytest.mark.parametrize("command", [["serve", "--help"], ["check", "--help"], ["config", "schema"]], ids=" ".join)
def test_commands_work_without_a_home_folder(containers: Runtime, command: list[str]) -> None:
    done = containers.run(["gateway", *command])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
