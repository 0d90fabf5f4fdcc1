"""A run's folder, as `loadtest run --out` leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.checkpoint.document import Freeze, Hardware, SourceTree
from loadtest.checkpoint.keep import Checkpoints, CommandContext
from loadtest.checkpoint.machine import runtime
from loadtest.checkpoint.servers import Neighbours
from loadtest.report.files import write_results
from loadtest.report.schema import Bounds
from tests.unit.loadtest.checkpoint.made import ENGINE, GATEWAY, plan, record, results

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of a run whose servers are gone, and which was not verified."""
    return keep(tmp_path, verify=False)


def keep(folder: Path, *, verify: bool, ended_early: bool = False, url: str = NOWHERE) -> Path:
    """Writes a run and its checkpoint."""
    servers = {server.name: server.model_copy(update={"url": url}) for server in (GATEWAY, ENGINE)}
    site = CommandContext(
        runtime(folder),
        Hardware(no_gpu="no GPU"),
        SourceTree(git_revision=None, dirty=None),
        packages=Freeze(packages=0, sha256="", named={}),
    )
    made = plan(url=url)
    records = [record(made, index, float(index)) for index in range(9)]
    found = results(made, records)
    found = found.model_copy(update={"verdict": found.verdict.model_copy(update={"ended_early": ended_early})})
    written = write_results(found, records, folder / "run")
    Checkpoints(Neighbours(servers), verify, site=site).keep("gateway", made, Bounds(), found, records, written)
    return folder / "run"
