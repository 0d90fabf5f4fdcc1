from structlog.testing import capture_logs

from gateway.core.observe.record import Record, RecordBatcher
from gateway.core.supervisor import Supervisor

SUPERVISOR = Supervisor(lambda: 0.0)


def record(number: int) -> Record:
    return Record(f"id-{number}", "chat", 0.0)


def test_every_consumer_gets_every_record_once_and_in_order() -> None:
    first: list[Record] = []
    second: list[Record] = []
    finished = RecordBatcher(SUPERVISOR)
    finished.consume(first.append, second.append)
    records = [record(number) for number in range(200)]
    for each in records:
        finished.add(each)
    finished.settle()
    finished.settle()
    assert first == second == records


def test_records_wait_until_there_are_64_or_settle_is_called() -> None:
    seen: list[Record] = []
    finished = RecordBatcher(SUPERVISOR)
    finished.consume(seen.append)
    for number in range(63):
        finished.add(record(number))
    assert seen == []
    finished.add(record(63))
    assert len(seen) == 64
    finished.add(record(64))
    finished.settle()
    assert len(seen) == 65


def test_what_one_consumer_raises_keeps_no_record_from_the_others() -> None:
    supervisor, seen = Supervisor(lambda: 0.0), list[Record]()

    def faulty(each: Record) -> None:
        if each.request_id == "id-1":
            raise OverflowError
        seen.append(each)

    later: list[Record] = []
    finished = RecordBatcher(supervisor)
    finished.consume(faulty, later.append)
    records = [record(number) for number in range(3)]
    for each in records:
        finished.add(each)
    with capture_logs():
        finished.settle()
    assert seen == [records[0], records[2]]
    assert later == records
    assert supervisor.faults == {"finished_requests": 1}


def test_a_consumer_of_batches_gets_all_that_there_are_and_its_fault_is_its_own() -> None:
    supervisor, batches, single = Supervisor(lambda: 0.0), list[list[Record]](), list[Record]()

    def faulty(_: list[Record]) -> None:
        raise OverflowError

    finished = RecordBatcher(supervisor)
    finished.consume(single.append)
    finished.consume_all(faulty, batches.append)
    records = [record(number) for number in range(3)]
    for each in records:
        finished.add(each)
    with capture_logs():
        finished.settle()
        finished.settle()
    assert batches == [records]
    assert single == records
    assert supervisor.faults == {"finished_requests": 1}
