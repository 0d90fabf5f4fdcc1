"""The rules of the code, as code."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.unit.layers import COMPOSITION_ROOT, EDGES, LAYERS

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
IMPURE = {"asyncio", "time", "datetime", "socket", "threading", "os", "uvloop", "aiohttp", "obstore", "psycopg"}
PACKAGES = sorted(path.name for path in (ROOT / "gateway").iterdir() if (path / "__init__.py").exists())
MIN_FILE_LINES = 40
SHORT_WITH_A_REASON = {
    "loadtest/vllm_cpu/dependencies.py",  # run by the Python of vLLM's environment, which has nothing of this project
}
LEAST_DOCSTRING_WORDS = 6  # a shorter one says no more than the name


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


def undocumented(body: list[ast.stmt]) -> Iterator[str]:
    """Public classes without a docstring."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield f"{node.name} (line {node.lineno})"


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
def test_modules_and_public_classes_say_what_they_are(path: Path) -> None:
    tree = TREES[path]
    assert ast.get_docstring(tree), "the module has no docstring"
    assert list(undocumented(tree.body)) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_docstring_of_a_function_says_more_than_its_name(path: Path) -> None:
    documented = {function.name: ast.get_docstring(function) for function in functions_of(path)}
    assert [name for name, text in documented.items() if text and len(text.split()) < LEAST_DOCSTRING_WORDS] == []


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=name_of)
def test_a_file_is_a_whole_idea(path: Path) -> None:
    short = len(path.read_text(encoding="utf-8").splitlines()) < MIN_FILE_LINES
    assert short == (name_of(path) in SHORT_WITH_A_REASON)


@pytest.mark.parametrize("house", ["gateway", "loadtest"])
def test_no_class_name_of_a_package_means_two_things(house: str) -> None:
    paths = [path for path in MODULES if path.relative_to(ROOT).parts[0] == house]
    defined = Counter(node.name for path in paths for node in ast.walk(TREES[path]) if isinstance(node, ast.ClassDef))
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


@pytest.mark.parametrize("path", GATEWAY, ids=name_of)
def test_no_error_is_kept_by_what_its_traceback_holds(path: Path) -> None:
    """A kept error that is raised refers to the frames that keep it: a cycle, with all that a request has in memory."""
    for node in ast.walk(TREES[path]):
        assert not isinstance(node, ast.Attribute) or node.attr != "set_exception", f"line {node.lineno}"
        if isinstance(node, ast.Raise) and node.exc is not None and not isinstance(node.exc, ast.Call):
            raised = ast.unparse(node.exc).split(".")[-1].lstrip("_")
            assert raised[0].isupper(), f"line {node.lineno}"  # a class


@pytest.mark.parametrize("path", GATEWAY, ids=name_of)
def test_no_purpose_shares_its_threads_and_none_keeps_the_process(path: Path) -> None:
    """Threads are those of `threads.Threads`, or daemons of one owner; no executor that all share, or that is joined
    when the process ends."""
    shared = {"to_thread", "run_in_executor", "set_default_executor", "ThreadPoolExecutor", "ProcessPoolExecutor"}
    for node in ast.walk(TREES[path]):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        assert name not in shared, f"line {node.lineno}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Thread":
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            assert given.get("daemon") == "True", f"line {node.lineno}"


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
    assert allowed("plan", "backends.probe")
    assert allowed("routing", "request")
    assert allowed(COMPOSITION_ROOT, "front.server")
    assert not allowed("plan", "cli.check")
    assert not allowed("routing", "app")
    assert not allowed("front", "insights.report")


@pytest.mark.parametrize("path", GATEWAY, ids=name_of)
def test_only_the_edges_know_a_loop_a_clock_or_the_network(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT / "gateway").with_suffix("").parts)
    impure = IMPURE & {module.split(".")[0] for module in imports_of(path)}
    assert bool(impure) == (module in EDGES), impure


def test_unit_tests_are_in_folders_named_after_the_packages() -> None:
    folders = {path.name for path in (ROOT / "tests" / "unit").iterdir() if (path / "__init__.py").exists()}
    assert folders - {"bench", "loadtest"} == set(PACKAGES)
    assert [name for name in PACKAGES if not list((ROOT / "tests" / "unit" / name).glob("test_*.py"))] == []


def test_the_rules_find_what_they_look_for() -> None:
    bad = ast.parse("class A:\n    def b(self): ...\nclass _D: ...\nclass E:\n    '''Described.'''\n")
    assert list(undocumented(bad.body)) == ["A (line 1)"]


def test_tests_that_need_the_machine_alone_are_where_make_test_looks_for_them() -> None:
    alone = [path for path in SOURCES if "pytest.mark." + "alone" in path.read_text(encoding="utf-8")]
    assert alone
    assert all(path.is_relative_to(ROOT / "tests" / "integration") for path in alone)
