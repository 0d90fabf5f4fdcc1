"""How arguments are passed: the first few by position, and the others by name."""

import ast
from collections.abc import Iterator, Sequence

from tests.rules.sources import HOUSES, Source

Found = Iterator[tuple[Source, int, str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Class = tuple[str, str]
"""A class: its module, and its name."""

COVERED = HOUSES
MOST_OF_A_CALL = 4
MOST_OF_A_CONSTRUCTOR = 3
# Functions of libraries that hand their arguments on to another one, or that take any number of alike ones.
VARIADIC = {
    "Progress", "add_row", "call_at", "call_later", "create_subprocess_exec", "given", "map", "max", "min", "partial",
    "push_async_callback",
}  # fmt: skip
# The gateway calls these for each request, event or decision, and `make instructions` counts what they cost: in Python,
# an argument by name costs more than one by position, most of all one of a constructor.
MEASURED = {
    "BatchKey", "ClientResponse", "CountingResponse", "Counts", "Demand", "Draft", "EmbeddingInputs",
    "EmbeddingWaiter", "EngineVerdict", "InferenceRequest", "Lease", "Measure", "OfflineLine", "Options", "Pause",
    "Piece", "Prompt", "QueueScan", "Record", "RequestTrace", "Reuse", "Sample", "Terms", "Ticket", "UpstreamResponse",
    "UpstreamResult", "Vectors", "_RadixNode",
    "_answer", "_bind_idle", "_find_ends", "_next_tickets", "_sampled", "_scan", "_send",
    "_succeeded", "alike", "answer_line", "bind", "bound", "choose", "cost_parts", "fits",
    "identity", "lease", "measure", "model_of", "placement_costs", "read", "sample", "take_head",
}  # fmt: skip


def by_position(sources: Sequence[Source]) -> Found:
    """A call passes at most four arguments by position."""
    for house in COVERED:
        spared = VARIADIC | _variadic(sources, house) | (MEASURED if house == "gateway" else set())
        for source in sources:
            for call in source.nodes() if source.house == house else ():
                if isinstance(call, ast.Call) and len(call.args) > MOST_OF_A_CALL:
                    name = _last_name(call.func)
                    if name not in spared:
                        yield source, call.lineno, f"{name} is passed {len(call.args)} arguments by position"


def taken_by_position(sources: Sequence[Source]) -> Found:
    """A constructor takes at most three arguments by position. Named tuples are rows, whose fields have an order."""
    classes = _Classes(sources)
    for (module, name), (source, node) in classes.every.items():
        count, is_measured = len(classes.positional(module, node)), source.house == "gateway" and name in MEASURED
        if source.house in COVERED and not is_measured and count > MOST_OF_A_CONSTRUCTOR:
            yield source, node.lineno, f"{name} takes {count} arguments by position"


def spread(sources: Sequence[Source]) -> Found:
    """No constructor gets a starred tuple, unless it takes any number of arguments: which one is which is not seen."""
    classes = _Classes(sources)
    for source in sources:
        if source.house in COVERED:
            handed_on = _handed_on(source)
            for call in source.nodes():
                if not isinstance(call, ast.Call) or not classes.is_fixed(source.module, call.func):
                    continue
                if any(isinstance(each, ast.Starred) and each not in handed_on for each in call.args):
                    yield source, call.lineno, f"{_last_name(call.func)} gets a starred argument"


class _Classes:
    """The classes of the project at the top level of their modules, and what each module calls them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.every = {
            (source.module, node.name): (source, node)
            for source in sources
            for node in source.tree.body
            if isinstance(node, ast.ClassDef)
        }
        self._imported: dict[str, dict[str, Class]] = {}
        self._modules: dict[str, dict[str, str]] = {}
        for source in sources:
            found, modules = self._imported.setdefault(source.module, {}), self._modules.setdefault(source.module, {})
            for node in source.nodes():
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        found[alias.asname or alias.name] = node.module, alias.name
                        modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def find(self, module: str, expression: ast.expr) -> Class | None:
        """The class that an expression in this module names; None = none of the project."""
        if isinstance(expression, ast.Subscript):
            return self.find(module, expression.value)
        key: Class | None = None
        if isinstance(expression, ast.Name):
            own = module, expression.id
            key = own if own in self.every else self._imported[module].get(expression.id)
        elif isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
            key = self._modules[module].get(expression.value.id, ""), expression.attr
        return key if key in self.every else None

    def positional(self, module: str, node: ast.ClassDef) -> list[str]:
        """What its constructor takes by position, as far as it has one of its own."""
        constructor = _constructor(node)
        if constructor is not None:
            return [each.arg for each in (*constructor.args.posonlyargs, *constructor.args.args)][1:]
        return self._fields(module, node) if _is_dataclass(node) else []

    def is_fixed(self, module: str, called: ast.expr) -> bool:
        """Whether this is a constructor that takes a fixed number of arguments."""
        if isinstance(called, ast.Name) and called.id == "cls":
            return True
        found = self.find(module, called)
        constructor = None if found is None else _constructor(self.every[found][1])
        return found is not None and (constructor is None or constructor.args.vararg is None)

    def _fields(self, module: str, node: ast.ClassDef) -> list[str]:
        """The fields of a dataclass that are passed by position, those of its bases first."""
        fields: dict[str, None] = {}
        for base in node.bases:
            if (found := self.find(module, base)) is not None and _is_dataclass(self.every[found][1]):
                fields |= dict.fromkeys(self._fields(found[0], self.every[found][1]))
        if any("kw_only=True" in ast.unparse(each) for each in node.decorator_list):
            return [*fields]
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                annotation, value = (
                    ast.unparse(statement.annotation),
                    ast.unparse(statement.value or ast.Constant(None)),
                )
                if annotation == "KW_ONLY":
                    break
                if "ClassVar" not in annotation and "init=False" not in value and "kw_only=True" not in value:
                    fields[statement.target.id] = None
        return [*fields]


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((it for it in node.body if isinstance(it, ast.FunctionDef) and it.name == "__init__"), None)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def _last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).split(".")[-1]


def _variadic(sources: Sequence[Source], house: str) -> set[str]:
    """Names under which a house, or one that it may use, defines functions with any number of arguments."""
    found = set()
    for source in sources:
        if house in (source.house, "tests") or source.house == "gateway":
            for node in source.nodes():
                if isinstance(node, Function) and node.args.vararg is not None:
                    found.add(node.name)
                elif isinstance(node, ast.ClassDef) and (constructor := _constructor(node)) is not None:
                    found |= {node.name} if constructor.args.vararg is not None else set()
    return found


def _handed_on(source: Source) -> set[ast.AST]:
    """Starred arguments that a function got in this way itself."""
    return {
        node
        for function in source.nodes()
        if isinstance(function, Function) and function.args.vararg is not None
        for node in ast.walk(function)
        if isinstance(node, ast.Starred) and ast.unparse(node.value) == function.args.vararg.arg
    }
