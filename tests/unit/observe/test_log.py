import io
import logging
import sys
from typing import Any

import orjson
import pytest
import structlog

from gateway.observe.log import QueuedText, logging_to, rendered


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    yield
    structlog.reset_defaults()


def test_an_event_is_a_json_line_with_its_level_and_time() -> None:
    out = io.BytesIO()
    with logging_to(out):
        structlog.get_logger().warning("something", backend="a")
        structlog.get_logger().debug("too much")
    [line] = out.getvalue().splitlines()
    document = orjson.loads(line)
    assert document.pop("timestamp")
    assert document == {"event": "something", "backend": "a", "level": "warning"}


def test_whatever_else_goes_to_standard_error_is_queued_too() -> None:
    out, before = io.BytesIO(), sys.stderr
    with logging_to(out):
        assert isinstance(sys.stderr, QueuedText)
        logging.getLogger("asyncio").error("a callback failed")
        sys.stderr.write("a tracebäck \udcff\n")
    assert sys.stderr is before
    assert "a tracebäck \\udcff\n" in out.getvalue().decode()


class Sly:
    """A value that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [Sly(), 10**5000], ids=["sly", "long"])
def test_an_event_that_cannot_be_rendered_is_logged_without_its_values(value: object) -> None:
    line = rendered(None, "info", {"event": "something", "value": value})
    assert orjson.loads(line)["event"] == "something"
    assert "log_error" in orjson.loads(line)
