"""The table of a comparison."""

from tests.bench.embeddings.run import Sample, table


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
