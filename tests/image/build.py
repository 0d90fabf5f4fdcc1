"""Build the image without a container engine and without an image registry: `python -m tests.image.build`.

buildah builds the Dockerfile, on a base made here from the distribution's own packages. Needs root, on Debian or
Ubuntu; elsewhere `docker build` does it. Everything stays in .image/, and the base is made once.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gateway import __version__
from tests.image import host

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / ".image"
IMAGE = f"localhost/vllm-batching-gateway:{__version__}"
TOOLS = ("buildah", "mmdebstrap", "runc")  # commands and packages have the same names; runc is for the tests
BASE = ("ca-certificates", "python3")  # packages
BUILDER = (*BASE, "python3-venv", "python3-dev", "gcc", "libc6-dev")
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
MADE_FOR_THIS_MACHINE = (
    "./etc/apt/apt.conf.d/99mmdebstrap", "./etc/apt/sources.list", "./etc/apt/sources.list.d", "./etc/resolv.conf",
)  # fmt: skip
LOG_TAIL_LINES = 20


class BuildFailed(Exception):
    """The image cannot be built; the message says why."""


def say(line: str) -> None:
    """Show progress."""
    sys.stdout.write(f"image: {line}\n")
    sys.stdout.flush()


def run(command: Sequence[str], log: Path, show: str | None = None) -> None:
    """Run a command, its output going to the log; lines that hold `show` are shown too, and its end if it fails."""
    lines: list[str] = []
    with (
        log.open("w") as sink,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            lines.append(line.rstrip())
            if show is not None and show in line:
                say(f"  {' '.join(line.split())[:110]}")
    if process.returncode != 0:
        tail = "\n".join(lines[-LOG_TAIL_LINES:])
        raise BuildFailed(f"`{command[0]}` failed with {process.returncode}; the end of {log}:\n{tail}")


def output(command: Sequence[str]) -> str:
    """What a command prints."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildFailed(f"`{' '.join(command)}` failed with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.strip()


def buildah(*arguments: str) -> list[str]:
    """A command line of buildah with a storage of its own; the driver vfs asks nothing of kernel or file system."""
    return [
        "buildah", "--root", f"{STORE}/storage", "--runroot", f"{STORE}/run", "--storage-driver", "vfs", *arguments
    ]  # fmt: skip


def install_tools() -> None:
    """Install with apt what is missing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return
    names = ", ".join(missing)
    if shutil.which("apt-get") is None:
        raise BuildFailed(f"install {names}; or use a container engine: docker build -t vllm-batching-gateway .")
    say(f"installing {names} with apt")
    run(["apt-get", "update", "-qq"], STORE / "apt.log")
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], STORE / "apt.log")


def make_base(tar: Path, release: str, packages: Sequence[str]) -> None:
    """Make a root file system that holds these packages, from where apt gets its packages here."""
    say(f"making a base from the packages of {release}: {', '.join(packages)}: about a minute, once")
    partial = tar.with_suffix(".partial")
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=tar", f"--include={','.join(packages)}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    command += [f"--aptopt={option}" for option in host.apt_options(output(["apt-config", "dump"]))]
    command += [f'--customize-hook=cd "$1" && rm -rf {" ".join(MADE_FOR_THIS_MACHINE)}']
    sources = host.apt_sources(Path("/etc/apt"), release)
    run([*command, release, str(partial), *map(str, sources)], tar.with_suffix(".log"))
    partial.rename(tar)


def import_base(tar: Path, name: str) -> None:
    """Make an image of the root file system."""
    say(f"importing the base as {name}")
    container = output(buildah("from", "scratch"))
    try:
        output(buildah("add", "--quiet", container, str(tar), "/"))
        output(buildah("commit", "--quiet", "--format", "docker", container, name))
    finally:
        output(buildah("rm", container))


def base_image(packages: Sequence[str]) -> str:
    """The name of a base with these packages, made unless it is there."""
    release = host.release_of(Path("/etc/os-release").read_text())
    recipe = hashlib.sha256(repr((packages, LEFT_OUT, MADE_FOR_THIS_MACHINE)).encode()).hexdigest()[:8]
    tar, name = STORE / f"base-{release}-{recipe}.tar", f"localhost/python-base:{release}-{recipe}"
    if not tar.exists():
        make_base(tar, release, packages)
    if not is_stored(name):
        import_base(tar, name)
    return name


def is_stored(image: str) -> bool:
    """Whether the storage holds an image."""
    return (
        subprocess.run(buildah("inspect", "--type", "image", image), check=False, capture_output=True).returncode == 0
    )


def pip_options(folder: Path) -> Iterable[str]:
    """Options that lend pip's settings on this machine to the build, not to the image."""
    settings = host.pip_settings(output([sys.executable, "-m", "pip", "config", "list"]))
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
        settings.setdefault("cert", bundle)
    file = folder / "pip.conf"
    file.write_text(host.pip_conf(settings))
    yield from ("--secret", f"id=pip.conf,src={file}")
    for path in host.local_paths(settings):
        yield from ("--volume", f"{path}:{path}:ro")


def build(base: str, builder: str) -> None:
    """Build the Dockerfile. The format is Docker's: the OCI's has no health check."""
    say(f"building {IMAGE}: two to three minutes")
    command = buildah("build", "--isolation", "chroot", "--format", "docker", "--pull=false", "--layers=false")
    revision = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=False, capture_output=True, text=True
    )
    arguments = {
        "BASE_IMAGE": base,
        "BUILDER_IMAGE": builder,
        "VERSION": __version__,
        "REVISION": revision.stdout.strip() or "unknown",
    }
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    with tempfile.TemporaryDirectory() as folder:
        run([*command, *pip_options(Path(folder)), "--tag", IMAGE, str(ROOT)], STORE / "build.log", show=" STEP ")
    output(buildah("rmi", "--prune"))  # what the tag named before


def main() -> int:
    """Command line: 0 built, 1 failed, 130 stopped by Ctrl-C."""
    started = time.monotonic()
    try:
        if os.geteuid() != 0:
            raise BuildFailed("needs root; with a container engine: docker build -t vllm-batching-gateway .")
        STORE.mkdir(exist_ok=True)
        install_tools()
        output(buildah("rm", "--all"))  # left by a run that was cut off
        with ThreadPoolExecutor() as pool:
            base, builder = pool.map(base_image, (BASE, BUILDER))
        build(base, builder)
        sizes = [output(buildah("images", "--format", "{{.Size}}", name)) for name in (IMAGE, base)]
    except (BuildFailed, host.UnknownHost) as error:
        say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130
    say(f"built {IMAGE}, {sizes[0]} of which {sizes[1]} are its base, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
