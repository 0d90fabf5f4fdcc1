"""The rules of the code, as code."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for house in ("gateway", "loadtest") for path in (ROOT / house).rglob("*.py"))
SOURCES = MODULES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "docs").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
MAX_FILE_LINES = 500
MAX_TEST_FILE_LINES = 500  # a table of cases may go on for longer
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "base"}

# What each part may import of the gateway. A part is the first name after `gateway`; `part.module` admits one module.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "request": set(),
    "complaints": set(),
    "config": {"complaints"},
    "config_file": {"config"},
    "memory": {"errors"},
    "supervisor": {"observe.quiet"},
    "routing": {"request"},
    "admission": {"request", "errors", "routing"},
    "descriptors": {"config"},
    "backends": {"config", "errors", "descriptors", "supervisor", "admission.limiter"},
    "observe": {"request", "supervisor"},
    "relay": {"request", "errors", "config", "descriptors", "supervisor", "backends"},
    "front": {
        "request",
        "errors",
        "config",
        "dispatch",
        "memory",
        "supervisor",
        "embeddings.coalescer",
        "embeddings.grouping",
        "scoring.pairs",
        "scoring.spreader",
        "admission.rate_limits",
        "relay.exchange",
        "routing.blocks",
        "routing.estimate",
        "routing.prompt",
        "routing.token_blocks",
        "backends.backend",
        "backends.registry",
        "observe.record",
    },
    "dispatch": {
        "request",
        "errors",
        "admission.gate",
        "backends.registry",
        "observe.metrics",
        "observe.record",
        "relay.exchange",
        "relay.relay",
        "relay.retry",
        "relay.usage",
        "routing.explain",
    },
    "embeddings": {
        "request",
        "errors",
        "config",
        "dispatch",
        "memory",
        "admission.backlog",
        "backends.backend",
        "backends.registry",
        "front.reply",
        "observe.embeddings",
        "observe.record",
        "relay.exchange",
        "tokenization.tokenization",
    },
    "scoring": {
        "request",
        "errors",
        "config",
        "dispatch",
        "memory",
        "admission.backlog",
        "embeddings.bulk",
        "embeddings.collected",
        "embeddings.deliver",
        "embeddings.fair",
        "embeddings.grouping",
        "embeddings.parsing",
        "embeddings.part",
        "embeddings.sizes",
        "embeddings.split",
        "embeddings.waiting",
        "backends.registry",
        "front.reply",
        "observe.embeddings",
        "observe.record",
        "relay.exchange",
    },
    "kv_events": {"config", "supervisor", "backends.backend", "routing.exact_index", "routing.token_blocks"},
    "tokenization": {"request", "errors", "config", "supervisor", "backends", "routing.token_blocks"},
    "plan": {"cli.check", "config", "backends.health"},
    "insights": {"request", "observe.record"},
}
# Decisions: values in, decisions out. They know no event loop, no clock, no chance, and no network.
PURE_ADMISSION = (
    "backlog.py", "candidate.py", "drain.py", "drain_rate.py", "kv_ledger.py", "limiter.py",
    "output_lengths.py", "placement.py", "queue.py", "rate_limits.py", "room.py", "seating.py",
    "turns.py",
)  # fmt: skip
PURE_EMBEDDINGS = (
    "answer.py", "batch.py", "bulk.py", "cache.py", "fair.py", "fit.py", "grouping.py", "parsing.py", "part.py",
    "sizes.py", "split.py", "suspects.py", "vectors.py",
)  # fmt: skip
PURE_FRONT = ("fields.py", "guards.py", "media.py", "quotes.py", "rewrite.py", "routes.py", "stored.py")
PURE_PLAN = (
    "advice.py", "checkpoint.py", "document.py", "memory.py", "model_shape.py", "plan.py", "weights.py",
)  # fmt: skip
PURE = [
    *sorted((ROOT / "gateway" / "routing").glob("*.py")),
    *(ROOT / "gateway" / "admission" / name for name in PURE_ADMISSION),
    *(ROOT / "gateway" / "backends" / name for name in ("blame.py", "health.py")),
    *(ROOT / "gateway" / "relay" / name for name in ("events.py", "usage.py", "retry.py")),
    *(ROOT / "gateway" / "embeddings" / name for name in PURE_EMBEDDINGS),
    *(ROOT / "gateway" / "scoring" / name for name in ("counting.py", "pairs.py", "scores.py")),
    *(ROOT / "gateway" / "plan" / name for name in PURE_PLAN),
    *(ROOT / "gateway" / "front" / name for name in PURE_FRONT),
]
HOUSES = [
    "admission",
    "backends",
    "cli",
    "embeddings",
    "front",
    "insights",
    "kv_events",
    "observe",
    "plan",
    "relay",
    "routing",
    "scoring",
    "tokenization",
]
IMPURE = {"asyncio", "time", "datetime", "socket", "threading", "os", "uvloop", "aiohttp"}
# Modules without a test of their own; tests/integration covers the composition root.
WITHOUT_A_MIRROR = {
    "gateway/__main__.py",
    "gateway/app.py",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, at whatever depth."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            assert node.module is not None
            yield node.module


def is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def undocumented(body: list[ast.stmt], inside: str = "") -> Iterator[str]:
    """Public classes, functions and methods without a docstring."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield f"{inside}{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{node.name}.")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_holds_more_than_one_idea_needs(path: Path) -> None:
    limit = MAX_TEST_FILE_LINES if path.relative_to(ROOT).parts[0] == "tests" else MAX_FILE_LINES
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_function_is_longer_than_a_screen(path: Path) -> None:
    too_long = {
        function.name: (function.end_lineno or 0) - function.lineno + 1
        for function in functions_of(path)
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert too_long == {}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_everything_public_says_what_it_is(path: Path) -> None:
    tree = TREES[path]
    assert ast.get_docstring(tree), "the module has no docstring"
    assert list(undocumented(tree.body)) == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_name_hides_what_a_module_is_for(path: Path) -> None:
    assert VAGUE_NAMES.isdisjoint({path.stem, *(parent.name for parent in path.relative_to(ROOT).parents)})


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_is_global_and_nothing_waits_by_wait_for(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        assert not isinstance(node, ast.Global), f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("wait_for", "ensure_future"), f"line {node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_task_is_never_made_without_keeping_it(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            kept_by_group = isinstance(called, ast.Attribute) and "group" in ast.unparse(called.value)
            assert kept_by_group or not ast.unparse(called).endswith("create_task"), f"line {node.lineno}"


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__main__.py"], ids=name_of)
def test_importing_a_module_does_nothing_but_define(path: Path) -> None:
    """Statements at the top level bind names; a call that is not kept may only complete what the module has made."""
    body = TREES[path].body
    own = {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if is_name(target)}
    for node in body:
        assert not isinstance(node, ast.For | ast.While | ast.With), f"line {node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            assert ast.unparse(node.value.func).split(".")[0] in own, f"line {node.lineno}"
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"), f"line {node.lineno}"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.relative_to(ROOT).parts[0] == "gateway"], ids=name_of
)
def test_each_part_of_the_gateway_imports_only_what_its_layer_may(path: Path) -> None:
    part = path.relative_to(ROOT / "gateway").with_suffix("").parts[0]
    if part not in LAYERS:
        return
    for module in imports_of(path):
        house, _, rest = module.partition(".")
        assert house != "loadtest"
        if house == "gateway" and rest:
            imported = rest.split(".")[0]
            allowed = imported == part or imported in LAYERS[part] or rest in LAYERS[part]
            assert allowed, f"{part} must not import {module}"


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_decisions_know_no_loop_no_clock_and_no_network(path: Path) -> None:
    assert IMPURE.isdisjoint(module.split(".")[0] for module in imports_of(path))


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if path.relative_to(ROOT).parts[0] == "gateway" and path.name != "__init__.py"],
    ids=name_of,
)
def test_each_module_of_the_gateway_has_a_test_of_its_name(path: Path) -> None:
    inside = path.relative_to(ROOT / "gateway")
    mirror = ROOT / "tests" / "unit" / inside.parent / f"test_{inside.name}"
    assert mirror.exists() != (name_of(path) in WITHOUT_A_MIRROR)


@pytest.mark.parametrize("house", HOUSES)
def test_each_test_file_of_a_part_is_named_after_a_module_of_it(house: str) -> None:
    modules = {path.stem for path in (ROOT / "gateway" / house).glob("*.py")}
    for path in (ROOT / "tests" / "unit" / house).glob("test_*.py"):
        named = path.stem.removeprefix("test_")
        about_the_gate = named == "cancellations"
        assert about_the_gate or any(named == module or named.startswith(f"{module}_") for module in modules), named


def test_the_rules_find_what_they_look_for() -> None:
    bad = ast.parse("class A:\n    def b(self): ...\nasync def c(): ...\nclass _D: ...\n")
    assert list(undocumented(bad.body)) == ["A (line 1)", "A.b (line 2)", "c (line 3)"]
