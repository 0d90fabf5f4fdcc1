import msgspec

from gateway.features.exact.endpoints import Source
from gateway.features.exact.events import Sockets
from gateway.features.exact.stream import Stream
from tests.unit.exact.listener import Listener
from tests.unit.exact.publisher import removed


def test_a_status_has_the_age_of_the_last_event() -> None:
    now = 10.0
    sockets = Sockets(lambda: now, lambda _: None)
    stream = Stream(
        7, "a", source=Source(1, "tcp://h:1", None), sockets=sockets, events=Listener(), deliver=lambda _: None
    )
    assert stream.as_dict()["last_event_seconds"] is None
    stream._take(0, msgspec.msgpack.encode([0.0, [removed([1])], 0]))
    now = 12.5
    found = stream.as_dict()
    assert (found["engine"], found["backend"], found["rank"], found["state"]) == (7, "a", 1, "connecting")
    assert (found["messages"], found["events"], found["gaps"]) == (1, 1, 0)
    assert found["last_event_seconds"] == 2.5
    sockets.context.destroy()
