from random import Random

import numpy as np

from gateway.insights.causes import Cause, find_cause
from gateway.insights.corpus import build
from gateway.insights.families import find_families
from gateway.insights.kinds import Kind
from gateway.insights.samples import Sample
from tests.unit.insights.traffic import Document, Prose, chat, read

PROSE = Prose(Random(9))


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
    assert (cause.kind, cause.part.name, cause.part.offset_bytes) == (Kind.TIMESTAMP, "messages[0] (system)", 6)
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
    assert cause.kind is Kind.TIMESTAMP


def test_files_that_users_paste_are() -> None:
    file, system = PROSE.text(3000), PROSE.text(1000)
    (cause,) = causes([chat(system, f"{PROSE.sentence()}\n{file}") for _ in range(12)])
    assert (cause.kind, cause.part.name) == (Kind.WORDS, "messages[1] (user)")
