from random import Random

import numpy as np
import pytest

from gateway.features.insights.families import build, find_families
from gateway.features.insights.report import _MAY_BE_NATURAL, _ORDERS, _PATTERNS, ADVICE, Cause, breakers, find_cause
from gateway.features.insights.samples import Sample, Snapshot, total
from tests.unit.insights.traffic import Document, Prose, chat, read, uuid

PROSE = Prose(Random(9))
SHARED = PROSE.text(4000)
SECONDS = 1800.0


def causes(documents: list[Document]) -> list[Cause]:
    texts = [b"".join(read(document).pieces) for document in documents]
    samples = [
        Sample(text, "m", "", "", (), (), float(place), 1, len(text), len(text) // 4)
        for place, text in enumerate(texts)
    ]
    corpus = build(samples, lambda: None)
    found = find_families(corpus, np.zeros(len(samples), np.int64), lambda: None)
    return [cause for cause in (find_cause(corpus, family) for family in found) if cause is not None]


def test_what_most_pairs_show_is_the_cause() -> None:
    system = PROSE.text(3000)
    documents = [chat(f"It is 09:{minute}.\n{system}", "Hi") for minute in range(10, 30)]
    documents[4] = chat(f"It is late.\n{system}", "Hi")
    (cause,) = causes(documents)
    assert (cause.kind, *cause.part) == (
        "timestamp",
        "messages[0] (system)",
        6,
    )
    assert len(cause.shown_by) == 17


def agents(system: str) -> list[Document]:
    """Of one repository: each has a task of its own, and reads the same files in an order of its own."""
    files, random = [PROSE.text(2000) for _ in range(4)], Random(2)
    documents = []
    for _ in range(12):
        messages: list[Document] = chat(system, PROSE.text(300))["messages"]
        for file in random.sample(files, 4):
            messages += [{"role": "assistant", "content": PROSE.text(80)}, {"role": "tool", "content": file}]
        documents.append({"messages": messages})
    return documents


def test_files_that_agents_read_are_no_cause() -> None:
    assert causes(agents(PROSE.text(2000))) == []


def test_a_time_before_them_is() -> None:
    system = PROSE.text(200)
    documents = agents(system)
    for number, document in enumerate(documents):
        document["messages"][0]["content"] = f"Now 2026-03-14 10:{number + 10}\n{system}"
    (cause,) = causes(documents)
    assert cause.kind == "timestamp"


def test_files_that_users_paste_are() -> None:
    file, system = PROSE.text(3000), PROSE.text(1000)
    (cause,) = causes([chat(system, f"{PROSE.sentence()}\n{file}") for _ in range(12)])
    assert (cause.kind, cause.part[0]) == ("words", "messages[1] (user)")


def described(texts: list[str], weight: int = 10, model: str = "m", show_text: bool = False) -> Document:
    samples = [
        Sample(text.encode(), model, "team", "", (), (), float(place), weight, len(text), len(text) // 4)
        for place, text in enumerate(texts)
    ]
    corpus = build(samples, lambda: None)
    causes = [find_cause(corpus, family) for family in find_families(corpus, corpus.matched(), lambda: None)]
    taken = Snapshot(
        SECONDS,
        now_seconds=SECONDS,
        since_start=total(()),
        epochs=[],
        samples=samples,
        models=frozenset(("m",)),
        show_text=show_text,
        holders=None,
    )
    (found,) = breakers(corpus, [cause for cause in causes if cause is not None], taken)
    return found


def test_families_of_one_cause_are_one_entry() -> None:
    other = PROSE.text(3000)
    texts = [f"Case {number}:\n{(SHARED, other)[number % 2]}" for number in range(100, 120)]
    found = described(texts)
    assert (found["requests"], found["variants"]) == (200, 20)
    assert abs(found["saved_tokens_per_request"] - 3500 / 4) < 20


def test_samples_stand_for_the_traffic() -> None:
    found = described([f"Case {number}:\n{SHARED}" for number in range(100, 120)])
    assert (found["samples"], found["requests"], found["requests_per_hour"]) == (20, 200, 400)
    assert abs(found["saved_tokens_per_request"] - 1000) < 20
    assert found["saved_tokens_per_hour"] == 400 * found["saved_tokens_per_request"]


def test_the_picture_goes_from_the_beginning_to_the_end() -> None:
    texts = [f"Always.\nCase {number}:\n{SHARED}{PROSE.text(400)}" for number in range(100, 112)]
    picture = described(texts)["picture"]
    assert [run["what"] for run in picture] == ["shared", "differs", "shared", "own"]
    assert abs(sum(run["tokens"] for run in picture) - len(texts[0]) // 4) < 10
    assert abs(picture[2]["tokens"] - 1000) < 30


def test_a_picture_of_many_changes_is_kept_short() -> None:
    lines = SHARED.splitlines()
    texts = ["\n".join(f"{line}\n{PROSE.sentence()}" for line in lines) for _ in range(12)]
    texts = [f"{PROSE.sentence()}\n{text}" for text in texts]
    assert len(described(texts)["picture"]) <= 13


def test_what_differs_further_on_is_named() -> None:
    random = Random(1)
    half = len(SHARED) // 2
    texts = [f"At 09:{number}\n{SHARED[:half]}\nrun {uuid(random)}\n{SHARED[half:]}" for number in range(10, 22)]
    found = described(texts)
    assert (found["kind"], found["also"]) == ("timestamp", ["uuid"])


def test_a_model_that_never_answered_is_not_named() -> None:
    texts = [f"Case {number}:\n{SHARED}" for number in range(10)]
    assert described(texts)["models"] == ["m"]
    assert described(texts, model="tell me a secret")["models"] == ["unknown"]


def test_the_same_family_has_the_same_name() -> None:
    one, other = ([f"Case {number + add}:\n{SHARED}" for number in range(10)] for add in (0, 500))
    assert described(one)["id"] == described(other)["id"]
    assert (
        described(one)["id"]
        != described([f"Case {number}:\n{PROSE.text(4000)[:0]}{SHARED[1000:]}" for number in range(10)])["id"]
    )


@pytest.mark.parametrize("show", [True, False])
def test_differing_text_is_shown_only_if_that_is_wanted(show: bool) -> None:
    texts = [f"Case {number}:\n{SHARED}" for number in range(100, 112)]
    found = described(texts, show_text=show)
    assert found.get("examples") == (["100", "101", "102", "103"] if show else None)


def test_the_advice_names_the_place_and_the_saving() -> None:
    found = described([f"Case {number}:\n{SHARED}" for number in range(100, 120)])
    assert found["advice"].startswith(f"{ADVICE[found['kind']]}; it is in prompt, byte 5. This saves about ")
    assert found["advice"].endswith(f" {found['saved_tokens_per_request']:,} tokens of prefill a request.")


def test_every_kind_has_an_advice() -> None:
    assert {kind for kind, _ in _PATTERNS} | {"words", "name", "extra text", "cache salt", *_ORDERS} == set(ADVICE)
    assert set(_MAY_BE_NATURAL) < set(ADVICE)
