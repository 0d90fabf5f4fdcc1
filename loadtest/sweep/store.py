"""The results folder: what is finished stays finished, under a name that changes when what was measured changes."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict

from loadtest.drive.record import Record
from loadtest.report.files import write_results
from loadtest.report.schema import Results
from loadtest.sweep.plan import SweepPlan, Way, Workload
from loadtest.sweep.space import Configuration

_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run."""

    configuration: Configuration
    way: Way
    workload: Workload
    _: KW_ONLY
    share: float
    repetition: int


class Failure(BaseModel):
    """Why there are no results."""

    model_config = ConfigDict(extra="forbid")

    why: str
    log: list[str]


class Store:
    """Reads and writes the results of a plan's runs."""

    def __init__(self, folder: Path, plan: SweepPlan) -> None:
        self.folder = folder
        self._served = plan.serve.model_dump(mode="json", exclude={"ready_seconds"})
        self._gateway = plan.gateway_config.read_text(encoding="utf-8") if plan.gateway_config else ""

    def folder_of(self, configuration: Configuration) -> Path:
        """The folder of a configuration's results and server log. Its name has no flags that are left out."""
        flags = {
            flag: value for flag, value in sorted(configuration.flags, key=lambda item: item[0]) if value is not None
        }
        label = Configuration(tuple(flags.items())).label
        name = re.sub(r"[^A-Za-z0-9._=-]+", "_", label)[:_LONGEST_NAME]
        return self.folder / "runs" / f"{name}-{_digest([self._served, flags])}"

    def run_folder(self, cell: SweepRun) -> Path:
        of = [cell.workload.run, self._gateway if cell.way == "gateway" else ""]
        load = f"{cell.workload.name}-{cell.way}-{_digest(of)}"
        return self.folder_of(cell.configuration) / load / f"{cell.share:.4g}-r{cell.repetition + 1}"

    def results(self, cell: SweepRun) -> Results | None:
        """The run's results, if it has ended."""
        file = self.run_folder(cell) / "results.json"
        return Results.model_validate_json(file.read_bytes()) if file.exists() else None

    def failure(self, cell: SweepRun) -> Failure | None:
        """Why the run, or the start of its server, has failed, if it has."""
        file = self.run_folder(cell) / "failure.json"
        return Failure.model_validate_json(file.read_bytes()) if file.exists() else None

    def is_done(self, cell: SweepRun) -> bool:
        """Whether there is nothing left to do for it."""
        folder = self.run_folder(cell)
        return (folder / "results.json").exists() or (folder / "failure.json").exists()

    def keep(
        self,
        cell: SweepRun,
        results: Results,
        records: Sequence[Record],
        besides: Callable[[Sequence[Path]], object] | None = None,
    ) -> None:
        """Writes the run's files, and what is made `besides` of them in their folder, all or nothing."""
        folder = self.run_folder(cell)
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        written = write_results(results, records, part)
        if besides is not None:
            besides(written)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)

    def keep_failure(self, cell: SweepRun, failure: Failure) -> None:
        """Writes why there are no results."""
        folder = self.run_folder(cell)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "failure.json.part"
        part.write_text(failure.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.rename(folder / "failure.json")

    def forget_failures(self) -> None:
        """So that they are tried again."""
        for file in self.folder.glob("runs/**/failure.json"):
            file.unlink()


def _digest(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:10]
