"""Each rule of the code finds what breaks it, and lets the usual way pass."""

import pytest

from tests.rules import arguments, rules
from tests.rules.rules import Rule
from tests.rules.sources import Source

BROKEN: dict[Rule, list[str]] = {
    rules.undocumented: ["x = 1", '"""A module."""\nclass A: ...'],
    rules.says_no_more: ['def close():\n    """Close it."""'],
    rules.is_relative: ["from . import a", "from .a import b"],
    rules.is_global: ["def a():\n    global b", "asyncio.wait_for(a, 1)", "asyncio.ensure_future(a)"],
    rules.keeps_an_error: ["future.set_exception(error)", "raise self._error", "raise error"],
    rules.misnames_a_method: [
        "class A:\n    def follow(self): ...",
        'class A:\n    def apply(self):\n        """Read a line."""',
    ],
    rules.shares_threads: ["await asyncio.to_thread(f)", "ThreadPoolExecutor()", "Thread(target=f)"],
    rules.loses_a_task: ["asyncio.create_task(f())", "loop.create_task(f())"],
    rules.does_something: ["f()", "for a in b: ...", "if a:\n    b = 1", "with a: ..."],
}
KEPT: dict[Rule, list[str]] = {
    rules.undocumented: ['"""A module."""\nclass _A: ...', '"""A module."""\nclass A:\n    """A class."""'],
    rules.says_no_more: ["def close(): ...", 'def close():\n    """Close the connection, whatever it waits for."""'],
    rules.is_relative: ["from gateway.a import b", "import gateway.a"],
    rules.is_global: ["async def a():\n    async with asyncio.timeout(1): ..."],
    rules.keeps_an_error: ["raise", "raise ValueError('x')", "raise ValueError", "raise _Own from error"],
    rules.misnames_a_method: [
        'class A:\n    def apply(self):\n        """Take over other limits."""',
        "def follow(): ...",
    ],
    rules.shares_threads: ["await threads.run(f)", "Thread(target=f, daemon=True)"],
    rules.loses_a_task: ["task = asyncio.create_task(f())", "group.create_task(f())"],
    rules.does_something: ["a = f()", "app = A()\napp.add(b)", "if TYPE_CHECKING:\n    import a"],
}


def cases(table: dict[Rule, list[str]]) -> list[tuple[Rule, str]]:
    return [(rule, text) for rule, texts in table.items() for text in texts]


@pytest.mark.parametrize(("rule", "text"), cases(BROKEN))
def test_what_breaks_a_rule_is_found(rule: Rule, text: str) -> None:
    assert [*rule(Source("gateway/a.py", text))]


@pytest.mark.parametrize(("rule", "text"), cases(KEPT))
def test_the_usual_way_passes(rule: Rule, text: str) -> None:
    assert [*rule(Source("gateway/a.py", text))] == []


def test_every_rule_of_a_file_is_tried() -> None:
    every = {*rules.OF_ALL, *rules.OF_HOUSES, *rules.OF_GATEWAY}
    assert every - {rules.is_vague} == BROKEN.keys() == KEPT.keys()


def test_a_name_says_what_a_file_is_for() -> None:
    assert [*rules.is_vague(Source("gateway/utils.py", ""))]
    assert [*rules.is_vague(Source("gateway/core/front/helpers/a.py", ""))]
    assert not [*rules.is_vague(Source("gateway/core/front/reply.py", ""))]


def test_a_layer_admits_its_own_modules_and_those_that_it_names() -> None:
    assert rules.allows("plan", "plan.memory")
    assert rules.allows("plan", "backends.probe")
    assert rules.allows("routing", "request")
    assert rules.allows("app", "front.server")
    assert not rules.allows("plan", "cli.check")
    assert not rules.allows("routing", "app")
    assert not rules.allows("front", "insights.report")


def together(rule: rules.Together, *sources: Source) -> list[str]:
    table = Source("tests/rules/layers.py", "")
    return [f"{source.name}: {text}" for source, _, text in rule([*sources, table])]


def test_what_a_part_may_not_import_is_found_at_any_depth() -> None:
    inner = Source("gateway/core/routing/a.py", "def f():\n    from gateway.app import Gateway")
    tester = Source("gateway/core/routing/b.py", "import loadtest.drive")
    new = Source("gateway/brand_new/a.py", "")
    assert together(rules.crosses_layers, inner, tester, new) == [
        "gateway/core/routing/a.py: routing may not import gateway.app",
        "gateway/core/routing/b.py: routing may not import loadtest.drive",
        "gateway/brand_new/a.py: brand_new is in no table of tests/rules/layers.py",
    ]


def test_who_knows_the_world_outside_is_in_the_table_and_nobody_else() -> None:
    knows = Source("gateway/core/routing/engine.py", "import time")
    knows_no_more = Source("gateway/process.py", "import math")
    assert together(rules.is_impure, knows, knows_no_more) == [
        "gateway/core/routing/engine.py: routing.engine imports time, and is not in EDGES",
        "gateway/process.py: process is in EDGES, and imports nothing of the world outside",
    ]


def test_a_class_name_means_one_thing_in_a_house() -> None:
    first, second = Source("gateway/a.py", "class A: ..."), Source("gateway/b.py", "class A: ...")
    assert together(rules.means_two_things, first, second) == ["gateway/b.py: class A is in gateway/a.py, too"]
    assert together(rules.means_two_things, first, Source("loadtest/b.py", "class A: ...")) == []


def test_packages_have_unit_tests_in_a_folder_of_their_name() -> None:
    code, test = Source("gateway/core/front/a.py", ""), Source("tests/unit/front/test_a.py", "")
    assert together(rules.tests_elsewhere, code, test) == []
    assert len(together(rules.tests_elsewhere, code)) == len(together(rules.tests_elsewhere, test)) == 1
    assert together(rules.tests_elsewhere, Source("tests/fault/test_a.py", rules.ALONE)) == [
        "tests/fault/test_a.py: tests that need the machine alone are in tests/integration"
    ]


ROW = "from dataclasses import KW_ONLY, dataclass\n@dataclass\nclass Row:\n"


def test_a_call_passes_four_arguments_by_position_at_most() -> None:
    many = Source("gateway/a.py", "add(1, 2, 3, 4, 5)")
    assert together(arguments.by_position, many) == ["gateway/a.py: add is passed 5 arguments by position"]
    assert together(arguments.by_position, Source("gateway/a.py", "add(1, 2, 3, 4, fifth=5)")) == []


def test_any_number_by_position_is_passed_where_any_number_is_taken_and_where_names_cost_too_much() -> None:
    text = "def add(*numbers): ...\nadd(1, 2, 3, 4, 5)\nmin(1, 2, 3, 4, 5)\nDemand(1, 2, 3, 4, 5)"
    assert together(arguments.by_position, Source("gateway/a.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "class Row:\n    def __init__(self, a, b, c, d): ...",
        f"{ROW}    a: int\n    b: int\n    c: int\n    d: int",
        f"{ROW}    a: int\n    b: int\n@dataclass\nclass Wide(Row):\n    c: int\n    d: int",
    ],
)
def test_a_constructor_takes_three_arguments_by_position_at_most(text: str) -> None:
    assert len(together(arguments.taken_by_position, Source("gateway/a.py", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "class Row:\n    def __init__(self, a, b, c, *, d): ...",
        f"{ROW}    a: int\n    b: int\n    c: int\n    _: KW_ONLY\n    d: int",
        f"{ROW}    a: int\n    b: int\n    c: int\n    d: int = field(init=False)\n    e: ClassVar[int] = 1",
        "class Row(NamedTuple):\n    a: int\n    b: int\n    c: int\n    d: int",
    ],
)
def test_more_are_taken_by_name_or_in_the_order_of_a_row(text: str) -> None:
    assert together(arguments.taken_by_position, Source("gateway/a.py", text)) == []


def test_no_constructor_gets_a_starred_tuple() -> None:
    row = Source("gateway/rows.py", "class Row:\n    def __init__(self, a, b): ...")
    text = "from gateway import rows\nfrom gateway.rows import Row\nRow(*pair)\nrows.Row(1, *pair)"
    assert together(arguments.spread, row, Source("gateway/a.py", text)) == 2 * [
        "gateway/a.py: Row gets a starred argument"
    ]


def test_a_starred_tuple_is_passed_where_any_number_is_taken_or_was_given() -> None:
    row = Source("gateway/rows.py", "class Row:\n    def __init__(self, *cells): ...\nclass Pair: ...")
    text = "from gateway.rows import Pair, Row\nRow(*cells)\ngather(*tasks)\ndef pair(*both):\n    return Pair(*both)"
    assert together(arguments.spread, row, Source("gateway/a.py", text)) == []
