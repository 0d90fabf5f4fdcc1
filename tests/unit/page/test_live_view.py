"""What the stream sends, of a gateway that is put together as always."""

from typing import Any

import orjson

from gateway.features.page.broadcast import event
from gateway.features.page.live_view import COLUMNS, MOST_POINTS, LiveView
from tests.unit.page.builders import House, record


class Scene:
    """Somebody watches."""

    def __init__(self, backends: int = 2, **sections: Any) -> None:
        self.house = House(backends, **sections)
        self.view = LiveView(self.house.gateway.operators.dashboard_sources)
        self.view.begin()

    def full(self) -> Any:
        return orjson.loads(orjson.dumps(self.view.full()))

    def tick(self, seconds: float = 1.0) -> Any:
        self.house.now += seconds
        return orjson.loads(orjson.dumps(self.view.tick()))

    def finish(self, count: int, **what: Any) -> None:
        for number in range(count):
            self.house.gateway.core.finished.add(record(f"r{number}", **what))


def test_who_begins_to_watch_gets_everything() -> None:
    scene = Scene(auth={"keys": [{"name": "a", "key": "sk-secret"}]}, models={"aliases": {"gpt": "m"}})
    scene.finish(3)
    scene.tick()
    shown = scene.full()
    assert [tile["name"] for tile in shown["fleet"]["tiles"]] == ["gpu-0", "gpu-1"]
    assert [row["request_id"] for row in shown["requests"]["rows"]] == ["r0", "r1", "r2"]
    assert shown["requests"]["from"] == 0
    assert shown["history"]["columns"] == list(COLUMNS)
    assert len(shown["history"]["points"]) == 1
    assert {"kind": "up", "subject": "gpu-0"}.items() <= shown["events"]["rows"][0].items()
    assert shown["settings"] == {
        "policy": "prefix", "port": 8080, "tls": False, "client_certificates": False, "keys": True,
        "prefix_report": True, "aliases": ["gpt"],
    }  # fmt: skip
    assert "sk-secret" not in str(shown)


def test_a_message_is_one_line() -> None:
    scene = Scene()
    scene.finish(3, model="a\nb", outcome="queue_full", error="first\n\nsecond")
    for document in (scene.view.full(), scene.view.tick()):
        message = event("full", document)
        assert message.count(b"\n") == 3
        assert message.endswith(b"\n\n")


def test_a_tick_has_what_is_new() -> None:
    scene = Scene()
    scene.finish(2, backend="gpu-0")
    first = scene.tick()
    assert (first["requests"]["from"], len(first["requests"]["rows"])) == (0, 2)
    assert first["traffic"]["outcomes"] == {"completed": 2.0}
    assert [tile["hit_rate"] for tile in first["fleet"]["tiles"]] == [0.8, None]
    second = scene.tick()
    assert (second["requests"], second["traffic"]["outcomes"]) == ({"from": 2, "rows": []}, {})
    assert second["events"]["rows"] == []
    scene.finish(1, outcome="queue_full")
    third = scene.tick(2.0)
    assert (third["requests"]["from"], [row["outcome"] for row in third["requests"]["rows"]]) == (2, ["queue_full"])
    assert dict(zip(COLUMNS, third["point"], strict=True))["failed"] == 0.5


def test_what_is_sent_is_bounded_however_many_requests_end() -> None:
    scene = Scene(64)
    scene.finish(10_000)
    shown = scene.tick()
    assert (shown["requests"]["from"], len(shown["requests"]["rows"])) == (9_800, 200)
    assert len(orjson.dumps(shown)) < 200_000
    for _ in range(MOST_POINTS + 5):
        scene.view.tick()
    assert len(scene.full()["history"]["points"]) == MOST_POINTS


def test_nothing_is_kept_when_nobody_watches_any_more() -> None:
    scene = Scene()
    scene.tick()
    scene.view.end()
    scene.view.begin()
    assert scene.full()["history"]["points"] == []


def test_the_queue_and_the_gateway_itself_are_in_each_message() -> None:
    scene = Scene(1)
    scene.house.place(6, tenant="team-a")
    shown = scene.tick()
    assert shown["queue"]["waiting"] == 2
    assert shown["queue"]["models"][0]["flows"][0]["tenant"] == "team-a"
    assert shown["gateway"]["retries_left"] == shown["gateway"]["retries_most"] == 10
    assert shown["gateway"]["memory_bytes"] > 0
    assert shown["gateway"]["watchers"] == 0
