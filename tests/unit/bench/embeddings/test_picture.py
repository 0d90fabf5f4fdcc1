"""Curves over the number of clients."""

from xml.etree import ElementTree

from tests.bench.embeddings.picture import picture
from tests.bench.embeddings.run import Sample


def samples(*clients: int) -> list[Sample]:
    return [
        Sample(arm, count, 100.0 * count, 1.0, 2.0, 0.5, 0.1)
        for count in clients
        for arm in ("direct", "not batching", "batching")
    ]


def test_each_way_has_a_curve_in_both_panels() -> None:
    root = ElementTree.fromstring(picture(samples(1, 8, 64)))
    curves = [element for element in root.iter() if element.get("class", "").startswith("line s")]
    assert len(curves) == 3 + 6  # the legend and two panels
    assert sum("strong" in element.get("class", "") for element in curves) == 3
    text = "".join(root.itertext())
    assert "requests per second over clients" in text
    assert "gateway, coalesce: false" in text


def test_one_number_of_clients_is_no_curve() -> None:
    assert picture(samples(8)) == ""
