"""Makes the checkpoint of a run that has just ended, and writes it beside the run's other files."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from gateway import __version__
from loadtest.checkpoint import accounts, redaction
from loadtest.checkpoint.asking import open_asker
from loadtest.checkpoint.document import (
    Answer,
    Check,
    Checkpoint,
    Freeze,
    Hardware,
    Runtime,
    Server,
    Source,
    Status,
    Summary,
    Workload,
    failed,
)
from loadtest.checkpoint.hardware import hardware
from loadtest.checkpoint.hashes import artefacts, plan_sha256, sent_sha256
from loadtest.checkpoint.markdown import markdown
from loadtest.checkpoint.neighbours import Neighbours
from loadtest.checkpoint.runtime import runtime
from loadtest.checkpoint.serving import look
from loadtest.checkpoint.verification import questions_of, verify_live
from loadtest.checkpoint.versions import freeze, source
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.report.schema import Results
from loadtest.report.statistics import value_of
from loadtest.report.summarise import Bounds

JSON_NAME, MARKDOWN_NAME = "checkpoint.json", "checkpoint.md"


@dataclass(frozen=True, slots=True)
class Site:
    """What is the same for all runs of one command. Looked at when the first run has ended: that takes a while."""

    runtime: Runtime = field(default_factory=runtime)
    hardware: Hardware = field(default_factory=hardware)
    source: Source = field(default_factory=source)
    packages: Freeze = field(default_factory=freeze)


@dataclass(slots=True)
class Checkpoints:
    """Makes the checkpoints of a command's runs."""

    neighbours: Neighbours
    verify: bool
    api_key: str | None = field(default=None, repr=False)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    site: Site | None = None

    def keep(
        self,
        target: str,
        plan: Plan,
        bounds: Bounds,
        results: Results,
        records: Sequence[Record],
        written: Sequence[Path],
    ) -> Checkpoint:
        """Verifies and writes. `target` is the driven server's name, `written` the run's files, all in one folder."""
        site = self.site = self.site or Site()
        skipped = "" if self.verify else "--no-verify"
        skipped = skipped or ("the run was ended by hand" if results.verdict.ended_early else "")
        servers, checks, answers = asyncio.run(self._asked(target, plan, skipped))
        if not skipped:
            checks += [*accounts.caps(results, records, servers), accounts.usage(results, servers)]
        made = Checkpoint(
            id=secrets.token_hex(8),
            started_at=results.environment.started_at,
            ended_at=self.now().isoformat(timespec="seconds"),
            command=results.environment.command,
            runtime=site.runtime,
            hardware=site.hardware,
            source=site.source,
            packages=site.packages,
            gateway_version=__version__,
            servers=[_without_users(server) for server in servers],
            workload=workload_of(plan, records),
            bounds=bounds,
            summary=summary_of(results),
            checks=checks,
            answers=answers,
            passed=results.verdict.passed and not failed(checks),
            artefacts=artefacts(written),
        )
        write(made, written[0].parent)
        return made

    async def _asked(self, target: str, plan: Plan, skipped: str) -> tuple[list[Server], list[Check], list[Answer]]:
        """The servers, and the live checks, unless there is a reason to skip them."""
        async with open_asker(self.api_key) as session:
            servers = [
                await look(
                    session, server.name, server.url,
                    driven=server.driven, named=server.named, admin_url=server.admin_url,
                )
                for server in self.neighbours.around(target)
            ]  # fmt: skip
            if skipped:
                return servers, [Check(name="all", status=Status.NOT_CHECKED, why=skipped)], []
            checks, answers = await verify_live(session, servers, *questions_of(plan, lambda: secrets.token_hex(8)))
            return servers, checks, answers


def _without_users(server: Server) -> Server:
    shown = {name: redaction.text(getattr(server, name)) for name in ("url", "admin_url")}
    return server.model_copy(update=shown)


def write(made: Checkpoint, folder: Path) -> list[Path]:
    document, page = folder / JSON_NAME, folder / MARKDOWN_NAME
    document.write_text(made.model_dump_json(indent=2) + "\n", encoding="utf-8")
    page.write_text(markdown(made), encoding="utf-8")
    return [document, page]


def workload_of(plan: Plan, records: Sequence[Record]) -> Workload:
    """Hashes of what was to be sent, and of what was."""
    specs = [part.workload for part in plan.mix] or [plan.workload]
    return Workload(
        plan_sha256=plan_sha256(plan),
        seed=plan.seed,
        files={spec.file.path: spec.file.sha256 for spec in specs if spec.file is not None},
        requests=len(records),
        sent_sha256=sent_sha256(records),
    )


def summary_of(results: Results) -> Summary:
    rates, latency = results.steady or results.overall, results.latency

    return Summary(
        offered=results.requests.offered,
        succeeded=results.requests.succeeded,
        failed=results.requests.failed,
        prompt_tokens=results.tokens.prompt,
        completion_tokens=results.tokens.completion,
        requests_per_second=rates.requests_per_second,
        output_tokens_per_second=rates.output_tokens_per_second,
        ttft_p50_ms=value_of(latency.ttft_from_intended, "p50"),
        ttft_p99_ms=value_of(latency.ttft_from_intended, "p99"),
        tpot_p50_ms=value_of(latency.tpot, "p50"),
        e2e_p99_ms=value_of(latency.e2e_from_intended, "p99"),
        valid=results.verdict.valid,
        passed=results.verdict.passed,
        reasons=results.verdict.reasons,
    )
