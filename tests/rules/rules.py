"""Each rule as a function of one file, or of all files, that yields its violations."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from tests.rules import arguments
from tests.rules.layers import CORE, EDGES, FEATURES, ROOTS
from tests.rules.sources import HOUSES, Source

Found = Iterator[tuple[int, str]]
"""Line and text of each violation."""
Rule = Callable[[Source], Found]
Together = Callable[[list[Source]], Iterator[tuple[Source, int, str]]]

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "base"}
IMPURE = {"asyncio", "time", "datetime", "socket", "threading", "os", "uvloop", "aiohttp", "obstore", "psycopg"}
SHARED_THREADS = {"to_thread", "run_in_executor", "set_default_executor", "ThreadPoolExecutor", "ProcessPoolExecutor"}
LEAST_DOCSTRING_WORDS = 6  # a shorter one says no more than the name
ALONE = "pytest.mark." + "alone"


def undocumented(source: Source) -> Found:
    """Modules and public classes say what they are."""
    if not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring"
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield node.lineno, f"class {node.name} has no docstring"


def says_no_more(source: Source) -> Found:
    """A docstring of a function says more than its name."""
    for node in source.nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text.split()) < LEAST_DOCSTRING_WORDS:
                yield node.lineno, f"the docstring of {node.name} says no more than the name"


def is_vague(source: Source) -> Found:
    """No name hides what a module is for."""
    for name in sorted(VAGUE_NAMES.intersection(source.name.removesuffix(".py").split("/"))):
        yield 1, f"{name!r} does not say what the file is for"


def is_relative(source: Source) -> Found:
    for node in source.nodes():
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import"


def is_global(source: Source) -> Found:
    """Nothing is global, and nothing waits by `wait_for`."""
    for node in source.nodes():
        if isinstance(node, ast.Global):
            yield node.lineno, "global statement"
        if isinstance(node, ast.Attribute) and node.attr in ("wait_for", "ensure_future"):
            yield node.lineno, f"{node.attr}: use asyncio.timeout, or create_task"


def keeps_an_error(source: Source) -> Found:
    """A kept error that is raised refers to the frames that keep it: a cycle, with all that a request has in memory."""
    for node in source.nodes():
        if isinstance(node, ast.Attribute) and node.attr == "set_exception":
            yield node.lineno, "set_exception keeps an error"
        if isinstance(node, ast.Raise) and node.exc is not None and not isinstance(node.exc, ast.Call):
            raised = ast.unparse(node.exc).split(".")[-1].lstrip("_")
            if not raised[0].isupper():
                yield node.lineno, f"{raised} is raised, which is no new error"


def misnames_a_method(source: Source) -> Found:
    """A verb of many classes means one thing: settings are applied, and nothing is followed."""
    for node in source.nodes():
        if not isinstance(node, ast.ClassDef):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                said = ast.get_docstring(method) or "Take over"
                if method.name == "follow":
                    yield method.lineno, "follow: apply takes over settings, update takes over what has changed"
                if method.name == "apply" and not said.startswith("Take over"):
                    yield method.lineno, "apply takes over settings, and says which ones"


def shares_threads(source: Source) -> Found:
    """Threads are those of `threads.Threads`, or daemons of one owner; no executor that all share, or that is joined
    when the process ends."""
    for node in source.nodes():
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in SHARED_THREADS:
            yield getattr(node, "lineno", 1), f"{name}: use threads.Threads"
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Thread":
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            if given.get("daemon") != "True":
                yield node.lineno, "a thread that is no daemon keeps the process"


def loses_a_task(source: Source) -> Found:
    """A task is kept, or belongs to a group."""
    for node in source.nodes():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            is_grouped = isinstance(called, ast.Attribute) and "group" in ast.unparse(called.value)
            if not is_grouped and ast.unparse(called).endswith("create_task"):
                yield node.lineno, "the task is not kept"


def does_something(source: Source) -> Found:
    """Statements at the top level bind names; a call that is not kept may only complete what the module has made."""
    if source.name.endswith("__main__.py"):
        return
    assigned = [target for node in source.tree.body if isinstance(node, ast.Assign) for target in node.targets]
    own = {target.id for target in assigned if isinstance(target, ast.Name)}
    for node in source.tree.body:
        if isinstance(node, ast.For | ast.While | ast.With):
            yield node.lineno, "a statement that runs when the module is imported"
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if is_call and ast.unparse(node).split("(")[0].split(".")[0] not in own:
            yield node.lineno, "a call that runs when the module is imported"
        if isinstance(node, ast.If) and ast.unparse(node.test) not in ("TYPE_CHECKING", "__name__ == '__main__'"):
            yield node.lineno, "a condition that is decided when the module is imported"


def within(module: str) -> str:
    """A module of the gateway, named without the folders that say which side of the seam the module is on."""
    names = module.split(".")[1:]
    return ".".join(names[1:] if names[:1] in (["core"], ["features"]) else names) or "__init__"


def allows(part: str, module: str) -> bool:
    """Whether a part of the gateway may import a module, named as `within` names modules."""
    imported = module.split(".")[0]
    if part in ROOTS or imported == part or (part in FEATURES and imported in CORE):
        return True
    allowed = CORE[part] if part in CORE else FEATURES[part]
    return imported in allowed or module in allowed


def crosses_layers(sources: list[Source]) -> Iterator[tuple[Source, int, str]]:
    """Each part of the gateway imports only what its layer may, and nothing of the load tester."""
    modules = frozenset(source.module for source in sources)
    for source in sources:
        if source.house != "gateway":
            continue
        part = within(source.module).split(".")[0]
        folder = source.name.split("/")[1]
        if part not in {*CORE, *FEATURES, *ROOTS}:
            yield source, 1, f"{part} is in no table of tests/rules/layers.py"
            continue
        if (folder == "features") != (part in FEATURES or part == "table") and part != "__init__":
            yield source, 1, f"{part} is on the other side of the seam"
        for line, module in source.imports(modules):
            house, _, rest = module.partition(".")
            if house == "loadtest" or (house == "gateway" and rest and not allows(part, within(module))):
                yield source, line, f"{part} may not import {module}"


def layers_of_nothing(sources: list[Source]) -> Iterator[tuple[Source, int, str]]:
    parts = {within(source.module).split(".")[0] for source in sources if source.house == "gateway"}
    table = next(source for source in sources if source.name == "tests/rules/layers.py")
    for part in sorted({*CORE, *FEATURES, *ROOTS} - parts):
        yield table, 1, f"there is an entry for {part}, which is not there"


def is_impure(sources: list[Source]) -> Iterator[tuple[Source, int, str]]:
    """Only the edges know a loop, a clock, chance or the network."""
    modules = frozenset(source.module for source in sources)
    for source in sources:
        if source.house == "gateway":
            name = within(source.module)
            name = f"{name}.__init__" if source.name.endswith("__init__.py") and name != "__init__" else name
            impure = sorted(IMPURE & {module.split(".")[0] for _, module in source.imports(modules)})
            if impure and name not in EDGES:
                yield source, 1, f"{name} imports {', '.join(impure)}, and is not in EDGES"
            if not impure and name in EDGES:
                yield source, 1, f"{name} is in EDGES, and imports nothing of the world outside"


def means_two_things(sources: list[Source]) -> Iterator[tuple[Source, int, str]]:
    """No class name of a house means two things."""
    for house in HOUSES:
        defined: dict[str, list[tuple[Source, int]]] = defaultdict(list)
        for source in sources:
            if source.house == house:
                for node in source.nodes():
                    if isinstance(node, ast.ClassDef):
                        defined[node.name].append((source, node.lineno))
        for name, places in defined.items():
            for source, line in places[1:]:
                yield source, line, f"class {name} is in {places[0][0].name}, too"


def tests_elsewhere(sources: list[Source]) -> Iterator[tuple[Source, int, str]]:
    """Unit tests are in folders named after the packages, and each package has some; tests that need the machine alone
    are where `make test` looks for them."""
    packages = {
        source.name.split("/")[-2] for source in sources if source.house == "gateway" and source.name.count("/") >= 2
    } - {"core", "features"}
    tested = {
        source.name.split("/")[2] for source in sources if source.name.startswith("tests/unit/")
        and source.name.count("/") > 2 and source.name.split("/")[-1].startswith("test_")
    } - {"bench", "loadtest"}  # fmt: skip
    table = next(source for source in sources if source.name == "tests/rules/layers.py")
    for package in sorted(packages ^ tested):
        yield table, 1, f"gateway/{package} and tests/unit/{package}: one has files and the other has none"
    for source in sources:
        if ALONE in source.text and not source.name.startswith("tests/integration/"):
            yield source, 1, "tests that need the machine alone are in tests/integration"


OF_ALL: list[Rule] = [is_vague]
OF_HOUSES: list[Rule] = [
    is_relative, undocumented, says_no_more, is_global, loses_a_task, does_something,
]  # fmt: skip
OF_GATEWAY: list[Rule] = [keeps_an_error, misnames_a_method, shares_threads]
TOGETHER: list[Together] = [
    crosses_layers, layers_of_nothing, is_impure, means_two_things, tests_elsewhere,
    arguments.by_position, arguments.taken_by_position, arguments.spread,
]  # fmt: skip


def violations(sources: list[Source]) -> Iterable[str]:
    """A line for each: file, line, and what is wrong."""
    for source in sources:
        rules = [*OF_ALL, *(OF_HOUSES if source.house in HOUSES else [])]
        rules += OF_GATEWAY if source.house == "gateway" else []
        for rule in rules:
            yield from (f"{source.name}:{line}: {text}" for line, text in rule(source))
    for together in TOGETHER:
        yield from (f"{source.name}:{line}: {text}" for source, line, text in together(sources))
