"""The built image, run by an OCI runtime as a careful host runs it: read-only, without capabilities, as its user."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.image.build import STORE, buildah, output

WAIT_SECONDS = 30.0
CONFIG_FOLDER = "/etc/gateway"


@dataclass(frozen=True)
class Image:
    """An image and its unpacked files."""

    name: str
    root: Path
    described: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """Its user, command, environment and so on."""
        config: Mapping[str, Any] = self.described["Docker"]["config"]
        return config


@contextmanager
def unpacked(name: str) -> Iterator[Image]:
    """An image from the storage, unpacked while the block runs."""
    described = json.loads(output(buildah("inspect", "--type", "image", name)))
    container = output(buildah("from", "--pull-never", name))
    try:
        yield Image(name, Path(output(buildah("mount", container))), described)
    finally:
        output(buildah("rm", container))


def runtime(*arguments: str) -> list[str]:
    """A command line of runc with a state folder of its own."""
    return ["runc", "--root", f"{STORE}/runc", *arguments]


@dataclass(frozen=True)
class Container:
    """Something that runs in the image, in the network of this machine."""

    name: str
    process: "subprocess.Popen[bytes]"

    def execute(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run one more command in it, as health checks are run."""
        full = runtime("exec", self.name, *command)
        return subprocess.run(full, check=False, capture_output=True, text=True, timeout=WAIT_SECONDS)

    def kill(self, signal: str) -> None:
        """Send a signal to its first process."""
        output(runtime("kill", self.name, signal))


class Runtime:
    """Starts containers of one image."""

    def __init__(self, image: Image, folder: Path) -> None:
        self.image = image
        self._folder = folder
        self._numbers = count(1)

    @contextmanager
    def running(self, command: Sequence[str] | None, config: Path, log: Path) -> Iterator[Container]:
        """A container with the image's entrypoint, and its default command if None; gone after the block."""
        arguments = [*self.image.config["Entrypoint"], *(self.image.config["Cmd"] if command is None else command)]
        bundle, name = self._bundle(arguments, config)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                runtime("run", "--bundle", str(bundle), name),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Container(name, process)
        finally:
            subprocess.run(runtime("delete", "--force", name), check=False, capture_output=True)
            process.wait(WAIT_SECONDS)

    def run(self, arguments: Sequence[str], config: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        bundle, name = self._bundle(arguments, config)
        full = runtime("run", "--bundle", str(bundle), name)
        try:
            return subprocess.run(
                full, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=WAIT_SECONDS
            )
        finally:
            subprocess.run(runtime("delete", "--force", name), check=False, capture_output=True)

    def _bundle(self, arguments: Sequence[str], config: Path | None) -> tuple[Path, str]:
        """Write what the runtime reads; gives its folder and the container's name."""
        name = f"{self._folder.name}-{next(self._numbers)}"
        bundle = self._folder / name
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(oci_config(self.image, arguments, config)))
        return bundle, name


def oci_config(image: Image, arguments: Sequence[str], config: Path | None) -> dict[str, Any]:
    """The runtime's configuration: the equivalent of --read-only --cap-drop ALL --network host."""
    user, group = (int(part) for part in image.config["User"].split(":"))
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755"]},
    ]
    if config is not None:
        mounts.append(
            {"destination": CONFIG_FOLDER, "type": "bind", "source": str(config), "options": ["bind", "ro", "nosuid"]}
        )
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": user, "gid": group},
            "args": list(arguments),
            "env": image.config["Env"],
            "cwd": image.config["WorkingDir"] or "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": str(image.root), "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
    }
