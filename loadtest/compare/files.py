"""Writes a comparison's own files; its runs have folders of their own."""

from __future__ import annotations

from pathlib import Path

from loadtest.compare import killed_picture
from loadtest.compare.picture import picture
from loadtest.compare.schema import Comparison
from loadtest.compare.words import markdown


def _killed(comparison: Comparison) -> str:
    arms = [arm.name for arm in comparison.arms]
    return killed_picture.picture(comparison.killed, arms) if comparison.killed else ""


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Returns what was written."""
    texts = {
        "compare.json": comparison.model_dump_json(indent=1) + "\n",
        "compare.md": markdown(comparison),
        "ttft.svg": picture(comparison),
        "killed.svg": _killed(comparison),
    }
    written = []
    for name, text in texts.items():
        if text:
            path = folder / name
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written
