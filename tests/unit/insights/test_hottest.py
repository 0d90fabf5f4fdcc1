from gateway.features.insights.samples import (
    OTHERS,
    Counts,
    Epoch,
    Reuse,
    Sample,
    applications,
    clients,
    counts,
    hottest,
    identity,
    merged,
)


def sample(key: int, name: str, text: bytes = b"some text") -> Sample:
    return Sample(text, "m", "a", name, (key, key + 1), (4, 9), 0.0, 1, len(text), 2)


def test_rates_are_of_reported_usage() -> None:
    assert counts(Counts(4, 100, 50, 40, 10))["hit_rate"] == 0.25
    assert counts(Counts(4, 100, 50, 40, 10))["predicted_hit_rate"] == 0.5
    assert counts(Counts(4, 100, 50, 0, 0))["hit_rate"] is None
    assert counts(Counts(0, 0, 0, 0, 0))["predicted_hit_rate"] is None


def test_epochs_are_added_up() -> None:
    epochs = [
        Epoch(0.0, {("a", 1): Counts(1, 2, 3, 4, 5)}),
        Epoch(1.0, {("a", 1): Counts(1, 1, 1, 1, 1), ("b", 1): Counts(1, 0, 0, 0, 0)}),
    ]
    rows = merged(item for epoch in epochs for item in epoch.rows.items())
    assert rows == {("a", 1): Counts(2, 3, 4, 5, 6), ("b", 1): Counts(1, 0, 0, 0, 0)}
    assert epochs[0].rows[("a", 1)] == Counts(1, 2, 3, 4, 5)


def test_keys_come_by_their_tokens() -> None:
    rows = {("a", 1): Counts(1, 10, 0, 0, 0), ("b", 2): Counts(1, 30, 0, 0, 0), ("a", 3): Counts(1, 15, 0, 0, 0)}
    assert [(row["client"], row["prompt_tokens"]) for row in clients(rows, 5)] == [("b", 30), ("a", 25)]
    assert len(clients(rows, 1)) == 1


def test_an_application_has_a_name_if_all_its_requests_give_the_same() -> None:
    rows = {("a", 1): Counts(2, 10, 0, 0, 0), ("a", 5): Counts(2, 9, 0, 0, 0)}
    listed = applications(rows, [sample(1, "shop"), sample(1, "shop"), sample(5, "x"), sample(5, "y")], 5, False)
    assert [(row["id"], row["name"]) for row in listed] == [(identity(1), "shop"), (identity(5), "")]
    assert "text" not in listed[0]
    assert applications(rows, [sample(1, "shop")], 5, True)[0]["text"] == "some text"


def test_applications_that_are_not_listed_are_one_entry() -> None:
    rows = {("a", number): Counts(2, number, 0, 0, 0) for number in range(1, 8)}
    rows |= {("a", OTHERS): Counts(10, 5, 0, 0, 0), ("a", 50): Counts(1, 100, 0, 0, 0)}
    listed = applications(rows, [], 3, False)
    assert [(row["id"], row["prompt_tokens"]) for row in listed] == [
        ("others", 115), (identity(7), 7), (identity(6), 6), (identity(5), 5),
    ]  # fmt: skip
    assert listed[0]["requests"] == 19


def test_applications_of_one_name_are_one() -> None:
    rows = {("a", 1): Counts(2, 10, 0, 0, 0), ("a", 5): Counts(2, 9, 0, 0, 0), ("b", 1): Counts(3, 8, 0, 0, 0)}
    listed = applications(rows, [sample(1, "shop"), sample(5, "shop")], 5, False)
    assert [(row["client"], row["name"], row["requests"]) for row in listed] == [("a", "shop", 4), ("b", "", 3)]


def reuse(requests: int, saved: float, parent: int = 0, backend: str = "b0") -> Reuse:
    return Reuse(400, 100.0, parent, requests, saved, frozenset({backend}))


def test_a_prefix_with_one_continuation_is_listed_as_the_longer_one() -> None:
    prefixes = {1: reuse(100, 500.0), 2: reuse(99, 900.0, 1), 3: reuse(40, 700.0, 2), 4: reuse(50, 100.0, 2)}
    listed = hottest([Epoch(0.0, {}, prefixes)], [], 10, False, None)
    assert [row["id"] for row in listed] == [identity(key) for key in (2, 3, 4)]
    assert [row["requests"] for row in listed] == [99, 40, 50]


def test_the_same_prefix_in_several_epochs_is_one() -> None:
    epochs = [Epoch(0.0, {}, {1: reuse(3, 5.0)}), Epoch(1.0, {}, {1: reuse(4, 6.0, 0, "b1")})]
    (row,) = hottest(epochs, [sample(1, "")], 10, True, None)
    assert (row["requests"], row["saved_tokens"], row["backends"], row["text"]) == (
        7,
        11,
        ["b0", "b1"],
        "some",
    )
