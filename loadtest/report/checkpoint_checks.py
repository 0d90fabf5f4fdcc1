"""What the checkpoint beside a run's results has checked."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ValidationError

from loadtest.report.schema import Check

_PASSED = {"ok": True, "failed": False}


class _Told(BaseModel):
    """A check as checkpoint.json has it; what else it holds is not read."""

    name: str
    status: str
    expected: str = ""
    found: str = ""
    why: str = ""


class _File(BaseModel):
    checks: list[_Told]


def checkpoint_checks(folder: Path) -> list[Check]:
    """None where there is no checkpoint, or none that can be read: `loadtest verify` tells more of it."""
    try:
        told = _File.model_validate_json((folder / "checkpoint.json").read_bytes()).checks
    except (OSError, ValidationError):
        return []
    return [Check(name=one.name, passed=_PASSED.get(one.status), message=_message(one)) for one in told]


def _message(told: _Told) -> str:
    differs = f"expected {told.expected}, found {told.found}" if told.expected or told.found else ""
    return "; ".join(filter(None, (differs, told.why))) if told.status != "ok" else ""
