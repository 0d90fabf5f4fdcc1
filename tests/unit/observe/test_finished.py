from gateway.observe.finished import Finished
from gateway.observe.record import Record


def record(number: int) -> Record:
    return Record(f"id-{number}", "chat", 0.0)


def test_every_consumer_gets_every_record_once_and_in_order() -> None:
    first: list[Record] = []
    second: list[Record] = []
    finished = Finished(first.append, second.append)
    records = [record(number) for number in range(200)]
    for each in records:
        finished.add(each)
    finished.settle()
    finished.settle()
    assert first == second == records


def test_records_wait_until_there_are_64_or_somebody_asks() -> None:
    seen: list[Record] = []
    finished = Finished(seen.append)
    for number in range(63):
        finished.add(record(number))
    assert seen == []
    finished.add(record(63))
    assert len(seen) == 64
    finished.add(record(64))
    finished.settle()
    assert len(seen) == 65
