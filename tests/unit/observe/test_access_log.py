import io
import json
import threading

import orjson

from gateway.observe.log import AccessLog, PrefixHashes, line_of
from gateway.observe.record import Record
from gateway.request import Demand


def record(**fields: object) -> Record:
    made = Record("id-1", "chat", 10.0)
    made.model, made.backend, made.outcome = "m", "a", "completed"
    made.status, made.attempts, made.ended_seconds = 200, 1, 12.5
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_line_has_times_in_milliseconds_since_arrival() -> None:
    line = line_of(record(first_byte_seconds=10.25, queue_seconds=0.125), 1_700_000_000.0)
    assert line.endswith(b"}\n")
    document = orjson.loads(line)
    assert document["time"] == 1_700_000_012.5
    assert (document["queue_ms"], document["first_byte_ms"], document["duration_ms"]) == (125.0, 250.0, 2500.0)


def test_what_did_not_happen_is_null() -> None:
    document = orjson.loads(line_of(Record("id", "unknown", 1.0), 0.0))
    for name in ("first_byte_ms", "client", "backend", "actual_hit_tokens", "reused_inputs", "error"):
        assert document[name] is None


def test_a_line_has_the_clients_name_of_the_model_if_that_is_another() -> None:
    assert "alias" not in orjson.loads(line_of(record(), 0.0))
    renamed = orjson.loads(line_of(record(alias="gpt"), 0.0))
    assert (renamed["model"], renamed["alias"], renamed["fell_back_from"]) == ("m", "gpt", None)
    prefixes = PrefixHashes(b"secret")
    both = orjson.loads(line_of(record(fell_back_from="n"), 0.0, prefixes))
    assert (both["alias"], both["fell_back_from"], both["prefix"]) == (None, "n", None)


def test_no_text_that_a_client_chose_makes_a_second_line() -> None:
    line = line_of(record(model='m"\n{"time":1}', error="a\nb"), 0.0)
    assert line.count(b"\n") == 1
    assert orjson.loads(line)["model"] == 'm"\n{"time":1}'


def test_what_orjson_cannot_write_is_written_all_the_same() -> None:
    document = json.loads(line_of(record(prompt_tokens=2**63, completion_tokens=2**70, model="\udcff"), 0.0))
    assert (document["prompt_tokens"], document["completion_tokens"], document["model"]) == (2**63, 2**70, "\udcff")
    assert line_of(record(error="a\nb", prompt_tokens=2**64), 0.0).count(b"\n") == 1


class Pipe(io.BytesIO):
    """An output whose reader may be stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.broken = False

    def write(self, data: object) -> int:
        assert self.open.wait(60)
        if self.broken:
            raise BrokenPipeError
        done = super().write(data)  # type: ignore[arg-type]
        self.written.set()
        return done


def log_to(out: Pipe) -> AccessLog:
    return AccessLog(out, lambda: 100.0, lambda: 1000.0)


def test_lines_are_written_in_order_and_none_is_lost_when_it_stops() -> None:
    out = Pipe()
    with log_to(out) as log:
        for number in range(1000):
            log.add([record(request_id=str(number))])
    lines = [orjson.loads(line) for line in out.getvalue().splitlines()]
    assert [line["request_id"] for line in lines] == [str(number) for number in range(1000)]
    assert lines[0]["time"] == 912.5
    assert log.dropped == 0


def test_lines_are_written_while_it_runs() -> None:
    out = Pipe()
    with log_to(out) as log:
        log.add([record()])
        assert out.written.wait(10)


def test_a_stuck_reader_costs_lines_but_never_stops_who_logs() -> None:
    out = Pipe()
    out.open.clear()
    with log_to(out) as log:
        for _ in range(100_000):
            log.add([record()])
        assert log.dropped >= 10
        out.open.set()
    assert len(out.getvalue().splitlines()) + log.dropped == 100_000


def test_a_reader_that_is_gone_costs_lines_that_are_counted() -> None:
    out = Pipe()
    out.broken = True
    with log_to(out) as log:
        log.add([record()])
        log.add([record()])
    assert log.dropped == 2


def test_hashes_of_prefixes_are_in_a_line_only_if_asked_for() -> None:
    ask = Demand("m", keys=(1, 2), edges=(256, 300), prompt_size=300)
    hashes = PrefixHashes(b"secret")
    assert b"prefix" not in line_of(record(demand=ask), 0.0).replace(b"prefix_", b"")
    prefix = orjson.loads(line_of(record(demand=ask), 0.0, hashes))["prefix"]
    assert prefix == {"bytes": 300, "ends": [256, 300], "hashes": hashes.of(ask)["hashes"]}
    assert orjson.loads(line_of(record(), 0.0, hashes))["prefix"] is None
