import json
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.features.insights.samples import PrefixReport, ReportLimits
from tests.unit.insights.traffic import (
    BYTES_PER_TOKEN,
    Document,
    Prose,
    Request,
    answered,
    chat,
    conversations,
    read,
    report_of,
    send,
    times,
    tools,
    uuid,
)

SYSTEM_BYTES = 6000


@pytest.fixture
def random() -> Random:
    return Random(11)


@pytest.fixture
def prose(random: Random) -> Prose:
    return Prose(random)


def report_on(documents: list[Document], **options: Any) -> Document:
    return report_on_requests([read(document) for document in documents], **options)


def report_on_requests(requests: list[Request], *, show_text: bool = False, **options: Any) -> Document:
    report = PrefixReport(0.0, Random(1), show_text=show_text)
    now = send(report, requests, **options)
    return report_of(report, now)


def only(report: Document) -> Document:
    (found,) = report["breakers"]
    assert isinstance(found, dict)
    return found


def near(value: float, truth: float, share: float = 0.1) -> bool:
    return abs(value - truth) <= share * truth


def questions(prose: Prose, count: int) -> list[str]:
    return [prose.text(160) for _ in range(count)]


def test_a_time_at_the_top_of_the_system_prompt_is_found(prose: Prose, random: Random) -> None:
    clock, system = times(random), prose.text(SYSTEM_BYTES)
    documents = [chat(f"You help.\nNow: {next(clock)}\n{system}", each) for each in questions(prose, 40)]
    report = report_on(documents)
    found = only(report)
    assert found["kind"] == "timestamp"
    assert found["part"] == "messages[0] (system)"
    assert found["part_offset_bytes"] == len("You help.\nNow: ")
    assert found["differs_bytes"] == len(next(clock))
    assert found["requests"] == found["samples"] == 40
    assert near(found["saved_tokens_per_request"], SYSTEM_BYTES / BYTES_PER_TOKEN)
    assert near(found["saved_tokens_per_hour"], 40 * 60 * SYSTEM_BYTES / BYTES_PER_TOKEN)  # 40 in what counts as 1 min
    assert report["shares"]["behind_a_difference"] > 0.9
    assert "Move the time" in found["advice"]


def test_a_time_that_changes_with_every_turn_costs_the_history_too(prose: Prose, random: Random) -> None:
    clock = times(random)
    documents = conversations(prose, random, [prose.text(SYSTEM_BYTES)], each=10, turns=6)
    for document in documents:
        system = document["messages"][0]
        system["content"] = f"Date: {next(clock)}\n{system['content']}"
    found = only(report_on(documents))
    assert found["kind"] == "timestamp"
    new_text = sum(len(document["messages"][-1]["content"]) for document in documents)
    new_text += sum(len(each["messages"][-2]["content"]) for each in documents if len(each["messages"]) > 2)
    whole = sum(len(message["content"]) for document in documents for message in document["messages"])
    assert near(found["saved_tokens_per_request"], (whole - new_text) / BYTES_PER_TOKEN / len(documents))


def test_an_id_in_the_first_line_is_found(prose: Prose, random: Random) -> None:
    system = prose.text(SYSTEM_BYTES)
    found = only(report_on([chat(f"[{uuid(random)}] {system}", each) for each in questions(prose, 30)]))
    assert found["kind"] == "uuid"
    assert found["part_offset_bytes"] == 1
    assert found["differs_bytes"] == 36
    assert near(found["saved_tokens_per_request"], SYSTEM_BYTES / BYTES_PER_TOKEN)


def test_shuffled_tools_are_found(prose: Prose, random: Random) -> None:
    offered = tools(prose, 8)
    documents = [
        chat(prose.text(100), each, tools=random.sample(offered, len(offered))) for each in questions(prose, 50)
    ]
    report = report_on(documents)
    found = only(report)
    assert (found["kind"], found["part"]) == ("tool order", "tools")
    assert found["part_offset_bytes"] < 60  # in the first tool
    whole = len(json.dumps(offered, separators=(",", ":"))) / BYTES_PER_TOKEN
    already = report["totals"]["window"]["actual_hit_tokens"] / 50
    assert near(found["saved_tokens_per_request"], whole - already, 0.12)


def test_json_keys_in_random_order_are_found(prose: Prose, random: Random) -> None:
    facts = [(f"field_{number}", prose.sentence()) for number in range(60)]
    size = len(json.dumps(dict(facts)))

    def shuffled() -> str:
        return json.dumps(dict(random.sample(facts, len(facts))))

    found = only(report_on([chat(f"What you know:\n{shuffled()}\nUse it.", each) for each in questions(prose, 40)]))
    assert found["kind"] == "JSON key order"
    assert abs(found["part_offset_bytes"] - len("What you know:\n{")) <= 12
    assert near(found["saved_tokens_per_request"], size / BYTES_PER_TOKEN)


def test_random_key_order_in_tools_is_distinguished_from_random_tool_order(prose: Prose, random: Random) -> None:
    offered = tools(prose, 6)

    def shuffled() -> list[Document]:
        functions = [dict(random.sample(list(tool["function"].items()), 3)) for tool in offered]
        return [{"type": "function", "function": function} for function in functions]

    found = only(report_on([chat(prose.text(100), each, tools=shuffled()) for each in questions(prose, 50)]))
    assert (found["kind"], found["part"]) == ("JSON key order", "tools")


def test_documents_in_random_order_are_found(prose: Prose, random: Random) -> None:
    pages = [prose.text(1200) for _ in range(7)]
    documents = [
        chat("Answer from these:\n\n" + "\n\n".join(random.sample(pages, len(pages))), each)
        for each in questions(prose, 50)
    ]
    report = report_on(documents)
    found = only(report)
    assert found["kind"] == "text order"
    already = report["totals"]["window"]["actual_hit_tokens"] / 50
    assert near(found["saved_tokens_per_request"], 7 * 1200 / BYTES_PER_TOKEN - already)


def test_a_name_in_the_greeting_is_found(prose: Prose, random: Random) -> None:
    def name() -> str:
        return " ".join("".join(random.choices("abcdefghij", k=6)).capitalize() for _ in range(2))

    system = prose.text(SYSTEM_BYTES)
    found = only(report_on([chat(f"You talk to {name()}.\n{system}", each) for each in questions(prose, 30)]))
    assert found["kind"] == "name"
    assert abs(found["part_offset_bytes"] - len("You talk to ")) <= 2
    assert near(found["saved_tokens_per_request"], SYSTEM_BYTES / BYTES_PER_TOKEN)


def test_names_that_come_again_cost_only_what_is_not_found_in_a_cache(prose: Prose, random: Random) -> None:
    names = [f"Customer {letter}{letter.lower()}" for letter in "ABCDEFGHIJKLMNOP"]
    system = prose.text(SYSTEM_BYTES)
    documents = [chat(f"You talk to {random.choice(names)}.\n{system}", each) for each in questions(prose, 64)]
    report = report_on(documents)
    already = report["totals"]["window"]["actual_hit_tokens"] / 64
    assert near(only(report)["saved_tokens_per_request"], SYSTEM_BYTES / BYTES_PER_TOKEN - already, 0.12)


def test_instructions_behind_a_document_are_found(prose: Prose) -> None:
    instructions = prose.text(3000)
    documents = [chat("", f"Summarise this:\n{prose.text(2000)}\n{instructions}") for _ in range(30)]
    found = only(report_on(documents))
    assert (found["kind"], found["part"]) == ("words", "messages[0] (user)")
    assert near(found["saved_tokens_per_request"], 3000 / BYTES_PER_TOKEN)
    assert "Put the shared text first" in found["advice"]


def test_a_history_that_is_cut_at_its_beginning_is_found(prose: Prose) -> None:
    said = [prose.text(500) for _ in range(70)]
    system = prose.text(1000)
    found = only(report_on([chat(system, *said[2 * turn : 2 * turn + 11]) for turn in range(29)]))
    assert (found["kind"], found["part"]) == ("extra text", "messages[1] (user)")
    assert near(found["saved_tokens_per_request"], 9 * 500 / BYTES_PER_TOKEN, 0.2)


def test_a_cache_salt_for_each_request_is_found(prose: Prose) -> None:
    system = prose.text(SYSTEM_BYTES)
    requests = [read(chat(system, each), salt=str(number)) for number, each in enumerate(questions(prose, 30))]
    found = only(report_on_requests(requests))
    assert (found["kind"], found["part"], found["position_bytes"]) == ("cache salt", "cache_salt", 0)
    assert near(found["saved_tokens_per_request"], SYSTEM_BYTES / BYTES_PER_TOKEN)


def test_the_same_prompts_for_several_models_are_no_cause(prose: Prose) -> None:
    system = prose.text(SYSTEM_BYTES)
    requests = [
        read(chat(system, each), model=f"model-{number % 8}") for number, each in enumerate(questions(prose, 32))
    ]
    assert report_on_requests(requests)["breakers"] == []


def test_a_shared_system_prompt_is_no_cause(prose: Prose) -> None:
    system = prose.text(SYSTEM_BYTES)
    report = report_on([chat(system, each) for each in questions(prose, 60)])
    assert report["breakers"] == []
    assert report["shares"]["hit"] > 0.9


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    applications=st.integers(1, 8),
    each=st.integers(1, 6),
    turns=st.integers(1, 5),
    longest=st.sampled_from((60, 700, 7000)),
)
def test_natural_traffic_gives_no_alarm(seed: int, applications: int, each: int, turns: int, longest: int) -> None:
    random = Random(seed)
    prose = Prose(random)
    shared = prose.text(400)  # a house style that every application begins or ends its system prompt with
    systems = [prose.text(random.randint(20, longest)) for _ in range(applications)]
    systems = [random.choice((system, shared + system, system + shared)) for system in systems]
    offered = tools(prose, random.randint(0, 5))
    fields: Document = {"tools": offered} if offered else {}
    documents = conversations(prose, random, systems, each, turns, **fields)
    assert report_on(documents, apart_seconds=random.choice((1.0, 0.05)))["breakers"] == []


@pytest.mark.parametrize("seed", range(20))
def test_documents_that_are_found_for_a_question_give_no_alarm(seed: int) -> None:
    random = Random(seed)
    prose = Prose(random)
    system, library = prose.text(1500), [prose.text(1200) for _ in range(80)]
    popular = [1 / place for place in range(1, 81)] if seed % 2 else [1.0] * 80

    def found() -> str:
        return "\n\n".join(dict.fromkeys(random.choices(library, popular, k=5)))

    assert report_on([chat(f"{system}\n{found()}", each) for each in questions(prose, 120)])["breakers"] == []


def test_every_cause_is_found_in_mixed_traffic(prose: Prose, random: Random) -> None:
    clock, offered = times(random), tools(prose, 7)
    one, other, third = prose.text(5000), prose.text(4000), prose.text(300)
    asked = iter(questions(prose, 200))
    documents = [chat(f"Clock {next(clock)}\n{one}", next(asked)) for _ in range(50)]
    documents += [chat(f"Run {uuid(random)}\n{other}", next(asked)) for _ in range(40)]
    documents += [chat(third, next(asked), tools=random.sample(offered, 7)) for _ in range(50)]
    documents += conversations(prose, random, [prose.text(2000) for _ in range(5)], each=6, turns=4)
    random.shuffle(documents)
    report = report_on(documents)
    assert {found["kind"] for found in report["breakers"]} == {"timestamp", "uuid", "tool order"}
    assert [found["requests"] for found in report["breakers"]] == [
        {"timestamp": 50, "uuid": 40, "tool order": 50}[found["kind"]] for found in report["breakers"]
    ]
    costs = [found["saved_tokens_per_hour"] for found in report["breakers"]]
    assert costs == sorted(costs, reverse=True)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


# Characters that the report itself does not write eight of in a row.
FOREIGN = st.text(st.characters(categories=("Lu", "Lo", "P", "Zs")), max_size=40)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(openings=st.lists(FOREIGN, min_size=6, max_size=12, unique=True), role=FOREIGN, seed=st.integers(0, 1000))
def test_no_text_of_a_prompt_is_in_the_report(openings: list[str], role: str, seed: int) -> None:
    prose = Prose(Random(seed))
    system = prose.text(3000).upper()
    documents = [chat(f"{opening}\n{system}", prose.text(100).upper()) for opening in openings]
    for document in documents:
        document["messages"].append({"role": role, "content": prose.text(50).upper()})
    report = report_on(documents, application="shop")
    assert report["breakers"]
    found_text = "\n".join(strings(report))
    for document in documents:
        text = "\n".join(strings(document["messages"]))
        assert not any(text[start : start + 8] in found_text for start in range(len(text) - 8))


def test_text_is_shown_if_that_is_switched_on(prose: Prose, random: Random) -> None:
    clock, system = times(random), prose.text(SYSTEM_BYTES)
    documents = [chat(f"Now: {next(clock)}\n{system}", each) for each in questions(prose, 20)]
    found = only(report_on(documents, show_text=True))
    assert all(example.startswith("2026-03-14T") for example in found["examples"])
    plain = report_on([chat(system, each) for each in questions(prose, 4)], show_text=True)
    assert system[:20] in plain["applications"][0]["text"]
    assert plain["prefixes"][0]["text"].endswith(system[-40:])


def test_keys_and_applications_have_their_own_rows(prose: Prose) -> None:
    systems = [prose.text(2000), prose.text(2000)]
    documents = [chat(systems[number % 2], each) for number, each in enumerate(questions(prose, 20))]
    report = report_on(documents, client=lambda number: ("even", "odd")[number % 2], application="shop")
    assert {entry["client"]: entry["requests"] for entry in report["clients"]} == {"even": 10, "odd": 10}
    assert [(entry["name"], entry["requests"]) for entry in report["applications"]] == [("shop", 10), ("shop", 10)]
    assert len({entry["id"] for entry in report["applications"]}) == 2


def test_few_samples_still_give_each_key_its_share(prose: Prose, random: Random) -> None:
    clock, systems = times(random), [prose.text(4000), prose.text(4000)]
    order = [int(random.random() < 0.25) for _ in range(1500)]
    documents = [chat(f"{next(clock)} of {'ab'[place]}\n{systems[place]}", "Hi") for place in order]
    report = report_on(documents, apart_seconds=0.02, client=lambda number: ("most", "some")[order[number]])
    assert report["samples"]["kept"] < 200
    by_client = {found["clients"][0]: found["requests"] for found in report["breakers"]}
    share = {entry["client"]: entry["requests"] for entry in report["clients"]}
    assert near(by_client["most"] / by_client["some"], share["most"] / share["some"], 0.01)
    assert near(by_client["most"] + by_client["some"], 1500, 0.06)


def test_hits_that_backends_do_not_report_are_predicted(prose: Prose) -> None:
    system = prose.text(2000)
    report = report_on([chat(system, each) for each in questions(prose, 10)], tells_cached=False)
    total = report["totals"]["window"]
    assert total["hit_rate"] is None
    assert total["actual_hit_tokens"] is None
    assert report["shares"]["hit"] == total["predicted_hit_rate"] > 0.7


def test_the_most_reused_prefix_is_the_system_prompt(prose: Prose) -> None:
    system = prose.text(4096)
    report = report_on([chat(system, each) for each in questions(prose, 50)])
    first = report["prefixes"][0]
    assert first["bytes"] == len(read(chat(system)).pieces[0])
    assert first["requests"] == 49
    assert near(first["saved_tokens"], 49 * 4096 / BYTES_PER_TOKEN, 0.02)
    assert first["backends"] == ["b0"]


def test_who_holds_a_prefix_can_be_asked_of_the_index(prose: Prose) -> None:
    system = prose.text(2048)
    report = PrefixReport(0.0, Random(1), holders=lambda key: ["x"] if key else [])
    now = send(report, [read(chat(system, each)) for each in questions(prose, 5)])
    assert report_of(report, now)["prefixes"][0]["backends"] == ["x"]


def test_a_window_leaves_out_what_is_older(prose: Prose) -> None:
    report = PrefixReport(0.0, Random(1))
    system = prose.text(2000)
    send(report, [read(chat(system, each)) for each in questions(prose, 7)])
    now = send(report, [read(chat(system, each)) for each in questions(prose, 3)], began=1800.0)
    last = report_of(report, now, window_seconds=600.0)
    assert last["totals"]["window"]["requests"] == 3
    assert last["samples"]["kept"] == 3
    assert last["totals"]["since_start"]["requests"] == 10
    assert report_of(report, now)["totals"]["window"]["requests"] == 10


def test_a_report_of_nothing_is_empty() -> None:
    report = report_of(PrefixReport(5.0, Random(1)), 6.0)
    assert report["breakers"] == report["prefixes"] == report["clients"] == []
    assert report["shares"] == {"hit": None, "behind_a_difference": None, "other": None}


def test_a_report_is_made_of_plain_values(prose: Prose, random: Random) -> None:
    clock, system = times(random), prose.text(SYSTEM_BYTES)
    report = report_on([chat(f"Now: {next(clock)}\n{system}", each) for each in questions(prose, 20)])
    assert json.loads(json.dumps(report)) == report


def test_a_request_that_was_not_answered_is_not_counted(prose: Prose) -> None:
    report = PrefixReport(0.0, Random(1))
    record = answered(read(chat(prose.text(2000), "hi")).demand, "a", 0, 1.0)
    record.demand = record.usage = None
    report.finished(record)
    assert report_of(report, 2.0)["totals"]["since_start"]["requests"] == 0


def test_memory_is_bounded_whatever_comes(prose: Prose, random: Random) -> None:
    limits = ReportLimits(
        per_second=1e9,
        burst=10**6,
        samples=50,
        total_bytes=200_000,
        text_bytes=8_000,
        epochs=3,
        epoch_seconds=50.0,
        rows=40,
        prefixes=60,
        taken=32,
    )
    report = PrefixReport(0.0, Random(1), limits=limits)
    requests = (
        read(chat(f"{uuid(random)} {prose.text(300)}", prose.text(random.randint(10, 12_000)))) for _ in range(600)
    )
    now = send(report, requests, client=lambda number: f"key-{number % 5}")
    samples = report.samples
    assert len(samples._kept) <= 50
    assert samples._bytes == sum(len(sample.text) for sample in samples._kept) <= 200_000
    assert all(len(sample.text) <= 8_000 for sample in samples._kept)
    assert len(samples._open) == 0
    epochs = report._epochs(-1.0)
    assert len(epochs) == 3
    assert all(len(epoch.rows) <= 45 and len(epoch.prefixes) <= 61 for epoch in epochs)
    assert report_of(report, now)["totals"]["since_start"]["requests"] == 600


def test_how_long_a_full_store_takes(capsys: pytest.CaptureFixture[str], prose: Prose, random: Random) -> None:
    """No bound is asserted: machines differ. The figures are printed."""
    clock = times(random)
    systems = [prose.text(9_000) for _ in range(8)]
    report = PrefixReport(0.0, Random(1))
    requests = [read(chat(f"{next(clock)} {random.choice(systems)}", each * 40)) for each in questions(prose, 530)]
    records = [answered(request.demand, "a", 0, 1.0) for request in requests]
    now = send(report, requests)
    began = time.perf_counter()
    document = report_of(report, now)
    made = time.perf_counter() - began
    for _ in range(20):
        began = time.perf_counter()
        for record in records:
            report.finished(record)
        counted = (time.perf_counter() - began) / len(records)
    kept = document["samples"]
    with capsys.disabled():
        sys.stdout.write(
            f"\nprefix report of {kept['kept']} prompts, {kept['bytes'] / 2**20:.1f} MiB: {made * 1000:.0f} ms;"
            f" counting a request: {counted * 1e6:.1f} us\n"
        )
    assert document["breakers"]
