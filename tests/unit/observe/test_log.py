import io
import logging
import re
import sys
from typing import Any

import orjson
import pytest
import structlog

from gateway.core.observe.log import EventLog, QueuedText


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    yield
    structlog.reset_defaults()


def test_an_event_is_a_json_line_with_its_level_and_time() -> None:
    out = io.BytesIO()
    with EventLog(out):
        structlog.get_logger().warning("something", backend="a")
        structlog.get_logger().debug("too much")
    [line] = out.getvalue().splitlines()
    document = orjson.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", document.pop("timestamp"))
    assert document == {"event": "something", "backend": "a", "level": "warning"}


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", ["a", "b", "c"]), ("info", ["b", "c"]), ("warning", ["c"]), ("error", [])]
)
def test_events_below_the_level_are_left_out(level: str, shown: list[str]) -> None:
    out, logger = io.BytesIO(), structlog.get_logger("made before")
    with EventLog(out) as log:
        log.apply(level, "json")
        logger.debug("a")
        logger.info("b")
        logger.warning("c")
    assert [orjson.loads(line)["event"] for line in out.getvalue().splitlines()] == shown


def test_lines_for_people_have_no_values_of_variables_in_tracebacks() -> None:
    out = io.BytesIO()
    with EventLog(out, lambda: 0.0) as log:
        log.apply("info", "console")
        try:
            secret = "sk-secret"
            raise ValueError("something is wrong")
        except ValueError:
            structlog.get_logger().exception("failed", backend="a", length=len(secret))
    first, *traceback = out.getvalue().decode().splitlines()
    assert first.split() == ["1970-01-01T00:00:00.000Z", "[error", "]", "failed", "backend=a", "length=9"]
    assert traceback[-1] == "ValueError: something is wrong"
    assert "'sk-secret'" not in "".join(traceback)


def test_whatever_else_goes_to_standard_error_is_queued_too() -> None:
    out, before = io.BytesIO(), sys.stderr
    with EventLog(out):
        assert isinstance(sys.stderr, QueuedText)
        logging.getLogger("asyncio").error("a callback failed")
        sys.stderr.write("a tracebäck \udcff\n")
        sys.stderr.write("several\nlines\nand ")
        sys.stderr.write("a rest\n")
    assert sys.stderr is before
    lines = [orjson.loads(line) for line in out.getvalue().splitlines()]
    assert {line["event"] for line in lines} == {"output"}
    texts = [line["text"] for line in lines]
    assert texts[-3:] == ["a tracebäck \\udcff", "several\nlines", "and a rest"]
    assert any("a callback failed" in text for text in texts) or logging.getLogger().handlers


class Sly:
    """A value that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [Sly(), 10**5000], ids=["sly", "long"])
def test_an_event_that_cannot_be_rendered_is_logged_without_its_values(value: object) -> None:
    line = EventLog(io.BytesIO()).rendered(None, "info", {"event": "something", "value": value})
    assert orjson.loads(line)["event"] == "something"
    assert "log_error" in orjson.loads(line)
