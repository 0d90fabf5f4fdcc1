"""How figures are written for people."""

from __future__ import annotations


def milliseconds(value: float | None) -> str:
    """Three significant digits and a fitting unit."""
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    if value >= 1_000:
        return f"{value / 1e3:.2f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def number(value: float | None) -> str:
    """Three significant digits at least, thousands set apart."""
    if value is None:
        return "-"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"
