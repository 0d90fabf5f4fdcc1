from typing import cast

import msgspec
import zmq

from gateway.kv_events.endpoints import Source
from gateway.kv_events.stream import Stream, Turn
from tests.unit.kv_events.publisher import removed


class Idle:
    """Stands for the reader."""

    now = 10.0

    def breathe(self) -> None:
        pass


def test_a_status_has_the_age_of_the_last_event() -> None:
    reader = Idle()
    context = zmq.Context[zmq.Socket[bytes]]()
    stream = Stream("a", Source(1, "tcp://h:1", None), context, cast(Turn, reader), lambda: reader.now)
    assert stream.as_dict(7)["last_event_seconds"] is None
    stream._take(0, msgspec.msgpack.encode([0.0, [removed([1])], 0]))
    reader.now = 12.5
    found = stream.as_dict(7)
    assert (found["engine"], found["backend"], found["rank"], found["state"]) == (7, "a", 1, "connecting")
    assert (found["messages"], found["events"], found["gaps"]) == (1, 1, 0)
    assert found["last_event_seconds"] == 2.5
    context.destroy()
