"""The checkpoints of a command's runs: what is known of the servers before, and what is written and told after."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from loadtest.checkpoint.document import Status, failed
from loadtest.checkpoint.keep import JSON_NAME, MARKDOWN_NAME, Checkpoints
from loadtest.checkpoint.markdown import check_line
from loadtest.checkpoint.neighbours import neighbours
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.target import Target, base_url
from loadtest.report.schema import Results
from loadtest.report.summarise import Bounds

_STYLES = {Status.OK: "green", Status.FAILED: "red", Status.NOT_CHECKED: "dim"}


@dataclass(slots=True)
class Keeping:
    """Writes the checkpoint of each run, and remembers whether every check held."""

    checkpoints: Checkpoints
    console: Console
    brief: bool = False
    passed: bool = True

    def keep(
        self,
        target: str,
        plan: Plan,
        bounds: Bounds,
        results: Results,
        records: Sequence[Record],
        written: Sequence[Path],
    ) -> None:
        """Tells a line for each check; of a series, for those that failed."""
        made = self.checkpoints.keep(target, plan, bounds, results, records, written)
        for check in failed(made.checks) if self.brief else made.checks:
            self._say(check_line(check), _STYLES[check.status])
        if self.brief:
            counts = Counter(check.status for check in made.checks)
            self._say(f"checks: {', '.join(f'{count} {status}' for status, count in counts.items())}", "dim")
        else:
            self._say(f"written: {', '.join(str(written[0].parent / name) for name in (JSON_NAME, MARKDOWN_NAME))}")
        self.passed = self.passed and not failed(made.checks)

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def prepared(
    options: RunOptions, looked: Mapping[str, Target], console: Console
) -> tuple[dict[str, Target], Keeping | None]:
    """The targets with the metrics pages behind them; nothing is asked and kept without --out."""
    if options.out is None:
        return dict(looked), None
    admin_url = base_url(options.admin_url) if options.admin_url else None
    known = asyncio.run(neighbours(options.target_urls, options.engine_urls, admin_url, options.api_key))
    targets = {
        name: target if target.metrics_url else replace(target, pages_behind=known.pages_behind(name))
        for name, target in looked.items()
    }
    return targets, Keeping(Checkpoints(known, options.verify, options.api_key), console, brief=options.runs > 1)
