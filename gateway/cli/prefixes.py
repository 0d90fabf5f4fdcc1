"""`gateway prefixes`: draws the report of a running gateway, with a picture of each cause."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gateway.plan.view import cells, title

Document = dict[str, Any]
_WIDTH = 64
_ROWS = 8
_SHARES = (
    ("hit", "found in a cache", "█", "green"),
    ("behind_a_difference", "seen before, but after a difference", "▒", "red"),
    ("other", "new, or evicted", "·", "dim"),
)
_NONE = "No cause found: no shared text follows a part that differs between prompts."


def as_view(report: Document) -> Group:
    return Group(*_parts(report))


def _parts(report: Document) -> Iterator[RenderableType]:
    yield from _totals(report)
    yield title("Causes of cache misses")
    if not report["breakers"]:
        samples = report["samples"]
        yield Text(_NONE if samples["kept"] else "No requests yet.")
        yield Text(f"Sampled {samples['kept']:,} prompts of {samples['of_requests']:,} requests.", style="dim")
    for number, breaker in enumerate(report["breakers"], start=1):
        yield from _breaker(number, breaker)
    if report["prefixes"]:
        yield title("Most reused prefixes")
        yield _prefixes(report["prefixes"][:_ROWS])
    if report["clients"]:
        yield title("By API key")
        yield _counts(report["clients"][:_ROWS], ("client",))
    if report["applications"]:
        yield title("By application (beginning of the prompt)")
        yield _counts(report["applications"][:_ROWS], ("id", "client", "name"))


def _totals(report: Document) -> Iterator[RenderableType]:
    table = _table("", "requests", "prompt tokens", "predicted hits", "actual hits", "hit rate")
    minutes = report["window_seconds"] / 60
    for name, key in ((f"last {minutes:,.0f} min", "window"), ("since start", "since_start")):
        row = report["totals"][key]
        table.add_row(name, *_numbers(row))
    yield table
    shares = report["shares"]
    if shares["hit"] is None:
        return
    bar = Text()
    widths = cells([shares[key] for key, *_ in _SHARES], _WIDTH)
    for width, (_, _, mark, style) in zip(widths, _SHARES, strict=True):
        bar.append(mark * width, style)
    yield Text("\nPrompt tokens of the last ") + Text(f"{minutes:,.0f} min")
    yield bar
    for key, meaning, mark, style in _SHARES:
        yield Text(f"{mark} ", style) + Text(f"{shares[key]:4.0%}  {meaning}", "default")


def _breaker(number: int, breaker: Document) -> Iterator[RenderableType]:
    saved = breaker["saved_tokens_per_hour"]
    head = Text(f"{number}. {breaker['kind']}", "bold red")
    head.append(f" in {breaker['part']}", "bold")
    if breaker["part"] != "cache_salt":
        place = f", byte {breaker['part_offset_bytes']:,} of it (token {breaker['position_tokens']:,} of the prompt)"
        head.append(place, "default")
    yield head
    clients = ", ".join(client or "(no key)" for client in breaker["clients"])
    facts = (
        f"About {breaker['requests']:,} requests of {clients}, {_round(breaker['requests_per_hour'])} per hour; "
        f"{breaker['variants']:,} variants in {breaker['samples']:,} sampled prompts; "
        f"costs {breaker['saved_tokens_per_request']:,} tokens per request, {_round(saved)} per hour."
    )
    yield _indented(Text(facts))
    yield _indented(_picture(breaker["picture"]))
    yield _indented(Text(breaker["advice"], "cyan"))
    if breaker["also"]:
        yield _indented(Text(f"Also found later in the prompt: {', '.join(breaker['also'])}.", "dim"))
    for example in breaker.get("examples", ()):
        yield _indented(Text(f"  {example!r}", "dim"))
    yield Text("")


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 3), expand=False)


def _picture(runs: Sequence[Document]) -> Group:
    """A prompt from left to right: shared text, differences, and shared text that a cache can no longer use."""
    bar, legend, behind = Text(), Text(), False
    for width, run in zip(cells([run["tokens"] for run in runs], _WIDTH), runs, strict=True):
        what = run["what"]
        if what == "shared":
            mark, style, word = ("█", "yellow", "shared, not cacheable") if behind else ("█", "green", "shared")
        elif what in ("differs", "reordered"):
            mark, style, word = "▒", "red", "differs" if what == "differs" else "in varying order"
            behind = True
        else:
            mark, style, word = "·", "dim", "unique"
        bar.append(mark * width, style)
        legend.append("  " if legend else "")
        legend.append(f"{mark} ", style)
        legend.append(f"{run['tokens']:,} {word}")
    return Group(bar, legend + Text(" (tokens)", "dim"))


def _prefixes(prefixes: Sequence[Document]) -> Table:
    table = _table("id", "tokens", "bytes", "requests", "tokens saved", "on backends", "ends in")
    for entry in prefixes:
        sizes = (f"{entry[key]:,}" for key in ("tokens", "bytes", "requests", "saved_tokens"))
        backends = ", ".join(entry["backends"]) or "none"
        table.add_row(entry["id"], *sizes, backends, repr(entry.get("text", ""))[1:-1])
    return table


def _counts(entries: Sequence[Document], names: tuple[str, ...]) -> Table:
    table = _table(*names, "requests", "prompt tokens", "predicted hits", "actual hits", "hit rate")
    for entry in entries:
        table.add_row(*(entry[name] or ("(no key)" if name == "client" else "") for name in names), *_numbers(entry))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        text = column in ("", "id", "client", "name", "on backends", "ends in")
        table.add_column(column, justify="left" if text else "right", overflow="fold")
    return table


def _numbers(row: Document) -> tuple[str, ...]:
    rate, actual = row["hit_rate"], row["actual_hit_tokens"]
    known = rate if rate is not None else row["predicted_hit_rate"]
    shown = "-" if known is None else f"{known:.1%}" + ("" if rate is not None else " (predicted)")
    counted = (f"{row[key]:,}" for key in ("requests", "prompt_tokens", "predicted_hit_tokens"))
    return (*counted, "not reported" if actual is None else f"{actual:,}", shown)


def _round(number: int) -> str:
    for size, unit in ((1_000_000_000, " billion"), (1_000_000, " million")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{int(float(f'{number:.3g}')):,}"
