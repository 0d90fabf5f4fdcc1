"""Reads report pages as a browser would find them."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "br", "link", "img", "input", "hr"}
_LOADING = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background", "formaction"}


class Reader(HTMLParser):
    """Collects tags, what they refer to, and the texts of scripts and styles; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()
        self.policy = ""
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        named = dict(attrs)
        self.links += [value or "" for name, value in attrs if name in _LOADING]
        self.handlers += [name for name in named if name.startswith("on")]
        if named.get("http-equiv") == "content-security-policy":
            self.policy = named["content"] or ""
        if tag in self.texts:
            self.texts[tag].append("")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += data


def read(html: str) -> Reader:
    """The page; every tag is closed."""
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def plots_of(html: str) -> list[dict[str, Any]]:
    """What the page's script draws."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    plots: list[dict[str, Any]] = json.loads(found[1])
    return plots


def assert_it_needs_nothing(html: str, links: list[str] | None = None) -> Reader:
    """Nothing is asked of any network, and nothing but the page's own scripts may run."""
    reader = read(html)
    assert reader.links == (links or [])
    for style in reader.texts["style"]:
        assert "@import" not in style
        assert "url(" not in style
    assert reader.policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "unsafe-inline" not in reader.policy.split("script-src")[1]
    assert reader.handlers == []
    return reader
