"""The batch-size curve of a closed loop in words and a table: the gain of more users, and the cost for each. Pure."""

from __future__ import annotations

from loadtest.report.formatting import milliseconds, number
from loadtest.report.series import Point, Series

_TOKENS = "output_tokens_per_second"
_FLAT = 1.1  # less is no gain
_STEEP = 0.75  # of what as many more users could bring
HEAD = ("users", "tokens/s", "over the first", "tokens/s and user", "TTFT p50", "TPOT p50")


def curve_table(series: Series) -> list[list[str]]:
    """A row for each number of users; empty where the runs are no curve of a single target."""
    points = _curve(series)
    return [_row(point, points[0]) for point in points]


def curve_words(series: Series) -> list[str]:
    """The curve in words; empty without one."""
    points, spoilt = _curve(series), [point for point in series.points if not point.valid]
    if not points:
        return []
    if spoilt:
        users = ", ".join(f"{point.offered:g}" for point in spoilt)
        return [f"The client could not keep up at {users} users: this is not the server's curve."]
    first, before, last = points[0], points[-2], points[-1]
    total = _tokens(last) / _tokens(first)
    slower = 1 - (_tokens(last) / last.offered) / (_tokens(first) / first.offered)
    lines = [
        f"From {first.offered:g} to {last.offered:g} users the server generates {total:.1f} times as many tokens "
        f"({number(_tokens(first))} to {number(_tokens(last))} tokens/s), and each user gets "
        f"{abs(slower):.0%} {'fewer' if slower >= 0 else 'more'} a second."
    ]
    step, fair = _tokens(last) / _tokens(before), last.offered / before.offered
    span = f"From {before.offered:g} to {last.offered:g} users"
    if step < _FLAT:
        lines.append(f"{span} it gains {step - 1:+.0%} only: it is saturated, and more users only wait longer.")
    elif step < _STEEP * fair:
        lines.append(
            f"{span} it gains {step:.1f} times the tokens with {fair:.1f} times the users: it is near saturation."
        )
    else:
        lines.append(
            f"{span} it gains {step:.1f} times the tokens with {fair:.1f} times the users: it is not saturated; "
            f"try more users, such as -c {last.offered:g},{2 * last.offered:g}."
        )
    return lines


def _curve(series: Series) -> list[Point]:
    points = [point for point in series.points if point.figures.get(_TOKENS) and _tokens(point) > 0]
    closed = series.plan["concurrency"] is not None and not series.plan.get("ramp_seconds")
    if not closed or len({point.target for point in points}) != 1 or len(points) < 2:
        return []
    return sorted(points, key=lambda point: point.offered)


def _tokens(point: Point) -> float:
    return point.figures[_TOKENS].median


def _row(point: Point, first: Point) -> list[str]:
    return [
        f"{point.offered:g}" + ("" if point.valid else " (invalid)"),
        number(_tokens(point)),
        f"{_tokens(point) / _tokens(first):.1f}x",
        number(_tokens(point) / point.offered),
        *(_milliseconds(point, name) for name in ("ttft_p50", "tpot_p50")),
    ]


def _milliseconds(point: Point, name: str) -> str:
    return milliseconds(point.figures[name].median if name in point.figures else None)
