"""The table of a comparison, and what is compared."""

from dataclasses import replace
from pathlib import Path

from tests.bench.embeddings.run import Options, Sample, table


def test_the_table_has_medians_by_load_and_way() -> None:
    samples = [
        Sample(arm, clients, rate, 1.0, 2.0, 0.5, 0.1)
        for clients in (1, 64)
        for arm in ("direct", "not batching", "batching")
        for rate in (10.0, 30.0, 20.0)
    ]
    lines = table(samples).splitlines()
    assert len(lines) == 2 + 6
    assert lines[2] == "| 1 | direct | 20 | 1.00 | 2.0 | 0.50 | 0.100 |"


def test_where_texts_come_again_ways_to_use_that_are_compared() -> None:
    options = Options("sim", Path("m"), (1,), 4, "base64", 1.0, 1, Path())
    assert options.gateways == ("not batching", "batching")
    again = replace(options, texts=3)
    assert again.gateways == ("batching", "caching")
    requests = again.requests(1)
    assert len({next(requests) for _ in range(50)}) == 3
    samples = [Sample(arm, 1, 1.0, 1.0, 2.0, 0.5, 0.1) for arm in again.gateways]
    assert [line.split(" | ")[1] for line in table(samples).splitlines()[2:]] == list(again.gateways)
