"""The result of a search for the highest load, in words: the load, and its limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.drive.search import Aim, LoadSearch
from loadtest.report.formatting import milliseconds, number, percent
from loadtest.report.schema import Results, Slo
from loadtest.report.series import Ran
from loadtest.report.statistics import value_of


@dataclass(frozen=True, slots=True)
class FoundLoad:
    """The highest load that keeps the SLO (None = none does), and its description."""

    load: float | None
    lines: list[str]


def carries(results: Results) -> bool:
    """Whether a run counts as a load that the target carries: it passed, each user sent, and no requests piled up."""
    return results.verdict.passed and not _idle_users(results) and not results.verdict.overloaded


def _idle_users(results: Results) -> int:
    """Users without a request: the load was below its nominal value."""
    return max(0, (results.plan["concurrency"] or 0) - results.requests.offered)


def answer_of(search: LoadSearch, ran: Sequence[Ran], *, stopped: bool = False) -> FoundLoad:
    """Names the load, and of the lowest load that was too much what it missed."""
    unit = "users" if search.aim is Aim.CONCURRENCY else "requests/s"
    best, limit = search.answer, search.limit
    beyond = _limiting(ran, limit) if limit is not None else None
    lines = []
    if stopped:
        lines.append("The search was stopped before its end; what follows is as far as it came.")
    if search.is_disturbed:
        lines.append(
            f"The search was given up: other work disturbed the client in {search.disturbances} runs at loads that it "
            "had carried before. Repeat it where nothing else uses the client's cores."
        )
    if best is None and not any(one.results.verdict.valid for one in ran):
        lines.append(f"Nothing is known of the server: every run was limited by {beyond}.")
        return FoundLoad(None, lines)
    if best is None and (passed := search.highest_passing) is not None:
        lines.append(f"{passed:g} {unit} kept the SLO ({slo_words(ran)}) in one run, which none confirmed.")
        return FoundLoad(None, lines)
    if best is None:
        tried = "" if limit is None else f" At {limit:g} {unit}: {beyond}."
        lines.append(f"No load keeps the SLO ({slo_words(ran)}).{tried}")
        return FoundLoad(None, lines)
    of_best = [one.results for one in ran if _offered(one) == best and carries(one.results)]
    lines.append(f"{best:g} {unit} within the SLO ({slo_words(ran)}), {_limited(limit, unit, beyond)}")
    lines.append(f"At {best:g} {unit}: {'; '.join(_figures(results) for results in of_best[:1])}")
    return FoundLoad(best, lines)


def _limited(limit: float | None, unit: str, beyond: str | None) -> str:
    if limit is None:
        return "and no limit was found."
    return f"limited by {beyond} (at {limit:g} {unit})."


def slo_words(ran: Sequence[Ran]) -> str:
    """The bounds that a load must keep, in words."""
    slo = next((one.results.slo for one in ran if one.results.slo is not None), None)
    if slo is None:
        return "none"
    bounds = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, "E2E": slo.e2e_ms}
    words = [f"{name} at most {milliseconds(bound)}" for name, bound in bounds.items() if bound is not None]
    return f"{', '.join(words)} for {slo.wanted:.0%} of requests"


def _limiting(ran: Sequence[Ran], limit: float) -> str:
    """The bounds missed by the runs at that load."""
    failed = [one.results for one in ran if _offered(one) == limit and not carries(one.results)]
    results = failed[-1]
    if not results.verdict.valid:
        return f"the client itself, not the server: {results.verdict.reasons[0]}"
    if results.requests.failed and not any(check.passed for check in results.verdict.checks if check.name == "errors"):
        kind = max(results.requests.errors, key=lambda name: results.requests.errors[name], default="")
        return f"errors: {results.requests.failed} requests failed, most of them {kind}"
    if results.slo is not None and not results.slo.passed:
        return _missed(results, results.slo)
    if _idle_users(results):
        return f"--requests or the file: {results.requests.offered} requests are fewer than users"
    if results.verdict.overloaded:
        return "capacity: requests came faster than they were answered, and piled up"
    return "; ".join(results.verdict.reasons)


def _missed(results: Results, slo: Slo) -> str:
    """The bound that the fewest requests kept."""
    if not slo.attainments:
        return f"the SLO, kept by {percent(slo.attainment)}"
    worst = min(slo.attainments, key=lambda name: slo.attainments[name])
    latency = results.latency
    measured = {"ttft": latency.ttft_from_intended, "tpot": latency.tpot, "e2e": latency.e2e_from_intended}[worst]
    p95 = value_of(measured, "p95")
    return f"{worst.upper()}: {percent(slo.attainments[worst])} of requests kept it, p95 {milliseconds(p95)}"


def _figures(results: Results) -> str:
    rates, latency = results.steady or results.overall, results.latency
    parts = [
        f"{number(rates.output_tokens_per_second)} output tokens/s",
        f"{number(rates.requests_per_second)} requests/s",
    ]
    for name, values in (("TTFT", latency.ttft_from_intended), ("TPOT", latency.tpot)):
        if values is not None:
            parts.append(f"{name} p95 {milliseconds(values.p95)}")
    return ", ".join(parts)


def _offered(one: Ran) -> float:
    plan = one.results.plan
    return float(plan["concurrency"] or plan["rate_per_second"])
