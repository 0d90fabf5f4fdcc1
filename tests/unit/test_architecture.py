"""The rules of the code, as code."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for house in ("gateway", "loadtest") for path in (ROOT / house).rglob("*.py"))
GATEWAY = [path for path in MODULES if path.relative_to(ROOT).parts[0] == "gateway"]
SOURCES = MODULES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "docs").rglob("*.py"))
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in MODULES}
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
MAX_FILE_LINES = 500
MAX_TEST_FILE_LINES = 500  # a table of cases may go on for longer
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "base"}

# What each part may import of the gateway. A part is the first name after `gateway`; `part.module` admits one module.
# Every part has an entry. COMPOSITION_ROOT alone may import all of them.
COMPOSITION_ROOT = "app"
LAYERS: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli.main"},
    "errors": set(),
    "request": set(),
    "request_ids": set(),
    "complaints": set(),
    "config": {"complaints"},
    "config_file": {"config"},
    "memory": {"errors"},
    "supervisor": {"observe.log_throttle"},
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
    "exact_prompts": {
        "request",
        "backends.backend",
        "backends.registry",
        "routing.exact_index",
        "routing.token_blocks",
        "tokenization.tokenization",
    },
    "cache_state": {
        "request",
        "config",
        "backends.backend",
        "backends.registry",
        "observe.metrics",
        "observe.record",
        "routing",
    },
    "limit_changes": {
        "admission.gate",
        "admission.limiter",
        "admission.placement",
        "backends.backend",
        "backends.registry",
        "observe.metrics",
        "observe.log_throttle",
        "observe.record",
    },
    "line_view": {
        "request",
        "admission.fairness",
        "admission.line",
        "admission.placement",
        "admission.queue",
        "observe.metrics",
    },
    "overview": {
        "request",
        "errors",
        "config",
        "exact_prompts",
        "cache_state",
        "admission.gate",
        "admission.limiter",
        "admission.placement",
        "admission.queue",
        "backends.backend",
        "backends.registry",
        "front.guards",
        "front.incoming",
        "front.read",
        "front.routes",
        "front.steps",
        "kv_events.endpoints",
        "kv_events.feed",
        "observe.metrics",
        "routing.explain",
        "routing.load",
        "routing.policy",
        "routing.seat",
        "tokenization.tokenization",
    },
    # Outside the serving path: only the composition root and the commands know them.
    "insights": {"request", "observe.record"},
    "plan": {"config", "backends.health", "cli.check"},
    "cli": {
        "app",
        "config",
        "config_file",
        "plan",
        "admission.limiter",
        "backends",
        "kv_events.endpoints",
        "kv_events.reach",
    },
}
# Decisions: values in, decisions out. They know no event loop, no clock, no chance, and no network.
PURE_ADMISSION = (
    "backlog.py", "candidate.py", "queue_scan.py", "service_rate.py", "kv_ledger.py", "limiter.py",
    "output_lengths.py", "placement.py", "queue.py", "rate_limits.py", "capacity.py", "engine_table.py",
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
    *sorted((ROOT / "gateway" / "insights").glob("*.py")),
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
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in NAMES else node.module


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


def test_no_class_name_of_the_gateway_means_two_things() -> None:
    defined = Counter(node.name for path in GATEWAY for node in ast.walk(TREES[path]) if isinstance(node, ast.ClassDef))
    assert [name for name, times in defined.items() if times > 1] == []


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


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "gateway").with_suffix("").parts[0]


def allowed(part: str, module: str) -> bool:
    """Whether a part may import a module, named without `gateway.` before it."""
    imported = module.split(".")[0]
    return part == COMPOSITION_ROOT or imported == part or imported in LAYERS[part] or module in LAYERS[part]


def test_every_part_of_the_gateway_has_its_layer_and_no_other_has() -> None:
    assert {part_of(path) for path in GATEWAY} == {*LAYERS, COMPOSITION_ROOT}


@pytest.mark.parametrize("path", GATEWAY, ids=name_of)
def test_each_part_of_the_gateway_imports_only_what_its_layer_may(path: Path) -> None:
    for module in imports_of(path):
        house, _, rest = module.partition(".")
        assert house != "gateway" or not rest or allowed(part_of(path), rest), f"{part_of(path)} imports {module}"


@pytest.mark.parametrize("path", GATEWAY, ids=name_of)
def test_the_gateway_imports_nothing_of_the_load_tests(path: Path) -> None:
    assert "loadtest" not in {module.partition(".")[0] for module in imports_of(path)}


def test_a_layer_admits_its_own_modules_and_those_that_it_names() -> None:
    assert allowed("plan", "plan.memory")
    assert allowed("plan", "cli.check")
    assert allowed("routing", "request")
    assert allowed(COMPOSITION_ROOT, "front.server")
    assert not allowed("plan", "cli.main")
    assert not allowed("routing", "app")
    assert not allowed("front", "insights.report")


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_decisions_know_no_loop_no_clock_and_no_network(path: Path) -> None:
    assert IMPURE.isdisjoint(module.split(".")[0] for module in imports_of(path))


@pytest.mark.parametrize("path", [path for path in GATEWAY if path.name != "__init__.py"], ids=name_of)
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
