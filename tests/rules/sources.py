"""The files that rules are about, parsed once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOUSES = ("gateway", "loadtest")
FOLDERS = (*HOUSES, "tests", "tools")


@dataclass(frozen=True)
class Source:
    """One file. `name`: its path below the root, with slashes."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def house(self) -> str:
        return self.name.partition("/")[0]

    @property
    def module(self) -> str:
        """The dotted name."""
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)

    def imports(self, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
        """Line and name of every module that is imported, at whatever depth. `modules`: those of the project."""
        for node in self.nodes():
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                for alias in node.names:
                    submodule = f"{module}.{alias.name}"
                    yield node.lineno, submodule if submodule in modules else module


def sources() -> list[Source]:
    """Every Python file of the project, in order."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
