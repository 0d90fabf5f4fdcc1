"""Documents as pages for a terminal, by Jinja templates in Rich's markup.

A line with tabs is a row of a table, and the first such line its head; the columns are numbers, unless the head begins
with `<`. A row that begins with `*` is bold. Leading spaces indent all of a paragraph, however it is wrapped. A line
that ends with a backslash continues in the next.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_BAR_CELLS = 64
_GIB = 1 << 30


def page(template: str, document: dict[str, Any]) -> Group:
    """A page to print. Raises TemplateError if the document lacks a value of the template."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else escape(str(value)),
    )
    environment.filters.update(
        bar=bar, count=_count, number="{:,}".format, picture=picture, repr=repr, rounded=_rounded, size=_size
    )
    lines = environment.get_template(template).render(document).replace("\\\n", "")
    return Group(*_parts(lines))


def _parts(text: str) -> Iterator[RenderableType]:
    for is_table, lines in groupby(text.splitlines(), key=lambda line: "\t" in line):
        if is_table:
            yield _table(line.split("\t") for line in lines)
            continue
        for line in lines:
            paragraph = Text.from_markup(line.lstrip())
            indent = len(line) - len(line.lstrip())
            yield Padding(paragraph, (0, 0, 0, indent), expand=False) if indent else paragraph


def _table(rows: Iterator[list[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in next(rows):
        table.add_column(name.removeprefix("<"), justify="left" if name.startswith("<") else "right", overflow="fold")
    for first, *others in rows:
        table.add_row(first.removeprefix("*"), *others, style="bold" if first.startswith("*") else None)
    return table


def bar(parts: Iterable[tuple[float, str, str, str]], most: float = float("inf")) -> Markup:
    """Parts (size, mark, style, meaning) from left to right: in proportion up to `most`, but at least one cell each."""
    shown = [(min(size, most), mark, style) for size, mark, style, _ in parts]
    whole = sum(size for size, *_ in shown) or 1
    widths = [max(1, round(size / whole * _BAR_CELLS)) if size else 0 for size, *_ in shown]
    while sum(widths) > _BAR_CELLS and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return Markup("".join(f"[{style}]{mark * width}[/]" for width, (_, mark, style) in zip(widths, shown, strict=True)))


def picture(runs: Sequence[dict[str, Any]]) -> list[tuple[int, str, str, str]]:
    """A prompt from left to right: shared text, differences, and shared text that a cache can no longer use."""
    drawn = {
        "shared": ("█", "green", "shared"),
        "differs": ("▒", "red", "differs"),
        "reordered": ("▒", "red", "in varying order"),
    }
    parts = []
    for run in runs:
        parts.append((run["tokens"], *drawn.get(run["what"], ("·", "dim", "unique"))))
        if run["what"] in ("differs", "reordered"):
            drawn["shared"] = ("█", "yellow", "shared, not cacheable")
    return parts


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def _size(size: int, least_gib: float = 0.1) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= int(least_gib * _GIB) else f"{size / (1 << 20):.1f} MiB"


def _rounded(number: int) -> str:
    for size, unit in ((1_000_000_000, " billion"), (1_000_000, " million")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{int(float(f'{number:.3g}')):,}"
