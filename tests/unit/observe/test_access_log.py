import io
import json
import threading

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.observe.log import AccessLog, LineForm, PrefixHashes, console_line_of, iso_time
from gateway.core.observe.record import Record
from gateway.core.request import Demand

ENDED = "2023-11-14T22:13:32.500Z"


def line_of(record: Record, ended: str, prefixes: PrefixHashes | None = None) -> bytes:
    return LineForm((), prefixes).line(record, ended)


def record(**fields: object) -> Record:
    made = Record("id-1", "chat", 10.0)
    made.model, made.backend, made.outcome = "m", "a", "completed"
    made.status, made.attempts, made.ended_seconds = 200, 1, 12.5
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_line_has_times_in_milliseconds_since_arrival() -> None:
    line = line_of(record(first_byte_seconds=10.25, queue_seconds=0.125), ENDED)
    assert line.endswith(b"}\n")
    document = orjson.loads(line)
    assert document["time"] == ENDED
    assert (document["queue_ms"], document["first_byte_ms"], document["duration_ms"]) == (125.0, 250.0, 2500.0)


@given(st.lists(st.floats(0, 4e9), max_size=5))
def test_times_are_cut_at_thousandths(times: list[float]) -> None:
    out = io.BytesIO()
    with AccessLog(out, lambda: 0.0, lambda: 0.0) as log:
        for seconds in times:
            log.add([record(ended_seconds=seconds)] * 2)  # the second time from what is kept
    shown = [orjson.loads(line)["time"] for line in out.getvalue().splitlines()]
    assert shown == [iso_time(int(seconds * 1e3) / 1e3 + 1e-5) for seconds in times for _ in range(2)]


def test_fields_that_are_asked_for_end_the_line() -> None:
    trace = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    known = record(tenant="blue", batch=True, response_bytes=7)
    known.came_from("10.0.0.9", b'curl/8 "x"' + b"y" * 200, trace)
    names = ("tenant", "class", "address", "user_agent", "trace_id", "response_bytes")
    line = orjson.loads(LineForm(names).line(known, ENDED))
    assert [*line][-6:] == [*names]
    assert [line[name] for name in names[:3]] == ["blue", "batch", "10.0.0.9"]
    assert (line["trace_id"], line["response_bytes"]) == ("4bf92f3577b34da6a3ce929d0e0e4736", 7)
    assert line["user_agent"].startswith('curl/8 "x"')
    assert len(line["user_agent"]) == 128
    known.came_from("10.0.0.9", b"", b"traceparent: " + trace + b"\r\n")  # as backends get it from the tracer
    assert orjson.loads(LineForm(names).line(known, ENDED))["trace_id"] == line["trace_id"]
    unknown = orjson.loads(LineForm(names).line(record(traceparent=b"nonsense"), ENDED))
    assert [unknown[name] for name in names] == [None, "interactive", None, None, None, 0]


def test_a_line_for_people_is_short_and_has_no_control_characters() -> None:
    line = console_line_of(
        record(first_byte_seconds=10.25, client="team-a", prompt_tokens=12, completion_tokens=3), ENDED
    )
    assert line.decode() == (
        f"{ENDED}  200 completed  chat  m  client=team-a  backend=a  queue=0ms  first_byte=250ms  duration=2500ms"
        "  tokens=12+3\n"
    )
    refused = console_line_of(record(model="\x1b[31m", error="a\n\x1b[0m", status=0, actual_hit_tokens=4), ENDED)
    assert refused.count(b"\n") == 1
    assert b"\x1b" not in refused


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "form", "for_people"),
    [
        (io.BytesIO(), "auto", False),
        (io.BytesIO(), "console", True),
        (Terminal(), "auto", True),
        (Terminal(), "json", False),
    ],
)
def test_lines_are_for_people_on_a_terminal_or_if_that_is_wanted(out: io.BytesIO, form: str, for_people: bool) -> None:
    log = AccessLog(out, lambda: 100.0, lambda: 1000.0)
    log.apply(LineForm(), enabled=True, style=form)
    with log:
        log.add([record()])
    assert out.getvalue().startswith(b"1970-" if for_people else b"{")


def test_what_did_not_happen_is_null() -> None:
    document = orjson.loads(line_of(Record("id", "unknown", 1.0), ENDED))
    for name in ("first_byte_ms", "client", "backend", "actual_hit_tokens", "error"):
        assert document[name] is None


def test_a_line_has_the_clients_name_of_the_model_if_that_is_another() -> None:
    assert "alias" not in orjson.loads(line_of(record(), 0.0))
    renamed = orjson.loads(line_of(record(alias="gpt"), 0.0))
    assert (renamed["model"], renamed["alias"], renamed["fell_back_from"]) == ("m", "gpt", None)
    prefixes = PrefixHashes(b"secret")
    both = orjson.loads(line_of(record(fell_back_from="n"), 0.0, prefixes))
    assert (both["alias"], both["fell_back_from"], both["prefix"]) == (None, "n", None)


def test_no_text_that_a_client_chose_makes_a_second_line() -> None:
    line = line_of(record(model='m"\n{"time":1}', error="a\nb"), ENDED)
    assert line.count(b"\n") == 1
    assert orjson.loads(line)["model"] == 'm"\n{"time":1}'


def test_what_orjson_cannot_write_is_written_all_the_same() -> None:
    document = json.loads(line_of(record(prompt_tokens=2**63, completion_tokens=2**70, model="\udcff"), ENDED))
    assert (document["prompt_tokens"], document["completion_tokens"], document["model"]) == (2**63, 2**70, "\udcff")
    assert line_of(record(error="a\nb", prompt_tokens=2**64), ENDED).count(b"\n") == 1


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
    assert lines[0]["time"] == "1970-01-01T00:15:12.500Z"
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
    assert b"prefix" not in line_of(record(demand=ask), ENDED).replace(b"prefix_", b"")
    prefix = orjson.loads(line_of(record(demand=ask), ENDED, hashes))["prefix"]
    assert prefix == {"bytes": 300, "ends": [256, 300], "hashes": hashes.of(ask)["hashes"]}
    assert orjson.loads(line_of(record(), ENDED, hashes))["prefix"] is None
