"""Checks as JUnit's XML: what failed a run is a failure with its reason; what an invalid run cannot tell is skipped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from pydantic import BaseModel, ValidationError

from loadtest.report.schema import Check, Results
from loadtest.report.series import Point, Series

# XML 1.0 has no way at all to write these.
_UNWRITABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INVALID = "the client was the limit, so the figures are not the server's"
Suite = tuple[str, Sequence[Check]]
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


def junit_of_run(results: Results, checkpoint: Sequence[Check] = ()) -> str:
    """One suite, and one of what the checkpoint checked; they fail exactly where the run did."""
    suites: list[Suite] = [(f"load test of {results.plan['model']}", run_checks(results))]
    return junit([*suites, ("checkpoint", checkpoint)] if checkpoint else suites)


def run_checks(results: Results) -> list[Check]:
    """One by one; files that do not tell them apart have the verdict only."""
    verdict = results.verdict
    if verdict.checks:
        return verdict.checks
    told = "; ".join(verdict.reasons)
    valid = Check(name="client keeps up", passed=verdict.valid, message="" if verdict.valid else told)
    passed = verdict.passed if verdict.valid else None
    return [valid, Check(name="errors and SLO", passed=passed, message="" if verdict.passed else told)]


def junit_of_series(series: Series, checkpoints: Mapping[str, Sequence[Check]] | None = None) -> str:
    """A suite for each target, and for what the checkpoint of each run checked; they fail where the series did.

    A load that is more than a target carries is a finding.
    """
    suites: list[Suite] = []
    for target in dict.fromkeys(point.target for point in series.points):
        its = [point for point in series.points if point.target == target]
        checks = [check for point in its for check in _of_point(point)]
        carried = any(point.passed == point.valid and point.valid for point in its)
        told = "no load passed in all its valid runs"
        suites.append(
            (target or "load tests", [*checks, Check(name="some load is carried", passed=carried, message=told)])
        )
    lost = [Check(name=name, passed=False, message=why) for name, why in series.failures.items()]
    suites += [("runs that could not be made", lost)] if lost else []
    suites += [(f"checkpoint of {folder}", checks) for folder, checks in (checkpoints or {}).items() if checks]
    return junit(suites)


def junit(suites: Sequence[Suite]) -> str:
    root = Element("testsuites")
    for name, checks in suites:
        failures, skipped = (sum(check.passed is outcome for check in checks) for outcome in (False, None))
        counts = {"tests": len(checks), "failures": failures, "errors": 0, "skipped": skipped}
        suite = SubElement(root, "testsuite", {"name": _written(name), **{key: str(n) for key, n in counts.items()}})
        for check in checks:
            case = SubElement(suite, "testcase", classname=_written(f"loadtest.{name}"), name=_written(check.name))
            if check.passed is False:
                SubElement(case, "failure", message=_written(check.message))
            elif check.passed is None:
                SubElement(case, "skipped", message=_written(check.message or _INVALID))
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _of_point(point: Point) -> list[Check]:
    told = f"{point.runs - point.valid} of {point.runs} runs are invalid: {_INVALID}"
    valid = Check(name=f"{point.load}: client keeps up", passed=point.valid == point.runs, message=told)
    all_passed = point.valid and point.passed == point.valid
    message = f"{point.passed} of {point.valid} valid runs passed"
    return [valid, Check(name=f"{point.load}: passes", passed=True if all_passed else None, message=message)]


def _written(text: str) -> str:
    return _UNWRITABLE.sub("\ufffd", text)


def checkpoint_checks(folder: Path) -> list[Check]:
    """The checks of a run's checkpoint; none without one that can be read: `loadtest verify` reports more of it."""
    try:
        told = _File.model_validate_json((folder / "checkpoint.json").read_bytes()).checks
    except (OSError, ValidationError):
        return []
    return [Check(name=one.name, passed=_PASSED.get(one.status), message=_message(one)) for one in told]


def _message(told: _Told) -> str:
    differs = f"expected {told.expected}, found {told.found}" if told.expected or told.found else ""
    return "; ".join(filter(None, (differs, told.why))) if told.status != "ok" else ""
