"""`gateway top`: the fleet, the queue and the last requests in the terminal, from the dashboard's stream.

Names of models, tenants and keys are chosen by clients: they are shown without characters that a terminal obeys.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

_MOST_ROWS: Final = 200
_LEAST_REQUESTS: Final = 4  # lines, however many engines there are
_BAR_CELLS: Final = 10
_LEAST_FIRST: Final = 16  # characters of names that a narrow terminal does not cut
_STATES: Final = {"up": "green", "down": "red", "ejected": "red"}
Cell = str | Text


def plain(value: object, most: int = 40) -> str:
    """Text without control characters, cut to this length."""
    text = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(value)[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}…"


class Top:
    """What the stream has sent so far. `screen` shows it."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._requests: deque[dict[str, Any]] = deque(maxlen=_MOST_ROWS)
        self._seen = 0  # requests

    def take(self, kind: str, news: dict[str, Any]) -> None:
        """Take over a message of the stream."""
        rows, start = news["requests"]["rows"], news["requests"]["from"]
        if kind == "full":
            self._requests.clear()
            self._seen = 0
        self._requests.extend(rows[max(0, self._seen - start) :])
        self._seen = max(self._seen, start + len(rows))
        self._state = news

    def screen(self, lines: int) -> RenderableType:
        """A page of about so many lines."""
        if not self._state:
            return Text("waiting for the gateway")
        tiles, queue = self._state["fleet"]["tiles"], _queue(self._state["queue"])
        head, room = self._head(), lines - len(queue) - 8
        engines = tiles[: max(1, room - _LEAST_REQUESTS)]
        parts: list[RenderableType] = [head, Text(), _fleet(engines)]
        if hidden := self._state["fleet"]["engines"] - len(engines):
            parts.append(Text(f"and {hidden} more", "dim"))
        parts += [Text(), _table(("Queue", "Class", "Waiting", "Oldest", "Expected", "Next waits for"), queue, 5)]
        last = list(self._requests)[-max(_LEAST_REQUESTS, room - len(engines)) :]
        return Group(*parts, Text(), _requests(reversed(last), self._state["time"]))

    def _head(self) -> Text:
        state = self._state
        traffic, gateway, tiles = state["traffic"], state["gateway"], state["fleet"]["tiles"]
        rate, completed = sum(traffic["outcomes"].values()), traffic["outcomes"].get("completed", 0.0)
        prompt = traffic["prompt_tokens"]
        hit_rate = f"{traffic['hit_tokens'] / prompt:.0%}" if prompt else "-"
        up = sum(tile["state"] == "up" for tile in tiles)
        return Text(
            f"{up}/{state['fleet']['engines']} engines up · {sum(tile['in_flight'] for tile in tiles)} in flight ·"
            f" {state['queue']['waiting']} waiting · {rate:.1f} requests/s, {rate - completed:.1f} failed ·"
            f" {traffic['output_tokens']:.0f} tokens/s · hit rate {hit_rate} ·"
            f" loop lag {gateway['lag']['mean_ms']:.1f} ms · CPU {gateway['cpu']:.0%} ·"
            f" {gateway['memory_bytes'] / 1e6:.0f} MB"
        )


def _table(names: Sequence[str], rows: Iterable[Sequence[Cell]], first_text: int = 99) -> Table:
    """Columns are numbers, but the first two, and those from `first_text` on. The first one is cut last."""
    rows = [*rows]
    longest = max((len(row[0]) for row in rows), default=0)
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim", show_edge=False)
    for place, name in enumerate(names):
        is_text = place < 2 or place >= first_text
        justify: JustifyMethod = "left" if is_text else "right"
        least = min(longest, _LEAST_FIRST) if place == 0 else None
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def _fleet(tiles: Sequence[dict[str, Any]]) -> Table:
    names = ("Engine", "State", "Slots", "", "KV reserved", "Prefill ahead", "Hit rate", "Trust", "Limit")
    return _table(names, map(_engine, tiles))


def _engine(tile: dict[str, Any]) -> list[Cell]:
    state = "draining" if tile["draining"] else tile["state"]
    name = tile["name"] if tile["rank"] is None else f"{tile['name']}#{tile['rank']}"
    kv, moved = tile["kv_tokens"], tile["limit_moved"]
    why = "" if state == "up" else f" {plain(tile['state_reason'], 30)}"
    return [
        plain(name, 30),
        Text(state + why, _STATES.get(state, "yellow")),
        f"{tile['in_flight']}/{tile['slots']}/{tile['cap']}",
        _bar(tile["in_flight"] / max(1, tile["cap"])),
        f"{tile['kv_reserved'] / kv:.0%}" if kv else "-",
        f"{tile['prefill_ahead_ms']:.0f} ms",
        "-" if tile["hit_rate"] is None else f"{tile['hit_rate']:.0%}",
        f"{tile['trust']:.0%}",
        f"{moved['before']}→{moved['after']} {moved['reason']}" if moved else "",
    ]


def _bar(share: float) -> Text:
    cells = round(_BAR_CELLS * min(1.0, max(0.0, share)))
    return Text("█" * cells, "blue") + Text("░" * (_BAR_CELLS - cells), "dim")


def _queue(queue: dict[str, Any]) -> list[list[Cell]]:
    """A row for each of the tenants with the longest queues."""
    rows = []
    for model in queue["models"][:3]:
        head = model["head"][0] if model["head"] else None
        waits_for = _waits_for(head) if head else ""
        for flow in model["flows"][:4]:
            expected = flow["expected_seconds"]
            rows.append(
                [
                    f"{plain(model['model'], 24)} {plain(flow['tenant'], 20)}",
                    flow["class"],
                    str(flow["waiting"]),
                    f"{flow['oldest_seconds']:.1f} s",
                    "-" if expected is None else f"{expected:.1f} s",
                    waits_for,
                ]
            )
            waits_for = ""
    return rows


def _waits_for(head: dict[str, Any]) -> str:
    if head["why"]:
        return plain(head["why"], 60)
    if not head["engines"]:
        return ""
    best = head["engines"][0]
    return f"{plain(best['engine'], 30)}: {best['why'] or 'open'}"


def _requests(rows: Iterable[dict[str, Any]], now: float) -> Table:
    names = ("Ended", "Model", "Wait", "TTFT", "Duration", "Prompt", "Hit", "Output", "Engine", "Outcome")
    return _table(names, (_request(row, now) for row in rows), 8)


def _request(row: dict[str, Any], now: float) -> list[Cell]:
    first, hit = row["first_byte_ms"], row["actual_hit_tokens"]
    outcome = row["outcome"]
    return [
        f"{max(0.0, now - row['time']):.0f} s ago",
        plain(row["model"] or row["endpoint"], 24),
        f"{row['queue_ms']:.0f} ms",
        f"{first:.0f} ms" if row["stream"] and first is not None else "-",
        f"{row['duration_ms']:.0f} ms",
        str(row["prompt_tokens"] or "-"),
        "-" if hit is None else str(hit),
        str(row["completion_tokens"] or "-"),
        plain(row["backend"] or "-", 24),
        Text(plain(outcome), "" if outcome == "completed" else "red"),
    ]
