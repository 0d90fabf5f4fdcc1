"""A URL with several engines behind it, as that of a Service: it is noticed, said once, and costs no slots."""

from itertools import count

import pytest

from gateway.cli.check import examine
from gateway.config.file import parse
from tests.clients import chat
from tests.fault.rig import holds, running
from tests.scripted import Connection, ScriptedBackend
from tests.scripts import answer, completion, whole

STARTS = {"in turn": (2000.0, 1000.0), "of three": (3000.0, 1000.0, 2000.0), "backwards": tuple(range(9000, 0, -7))}


def plays_several(backend: ScriptedBackend, starts: tuple[float, ...]) -> list[int]:
    """Each look at /metrics is answered by the next engine; returns how many there were."""
    looks = count()
    seen = [0]

    async def metrics(connection: Connection) -> None:
        start = starts[next(looks) % len(starts)]
        seen[0] += 1
        page = f'vllm:num_requests_running{{engine="0"}} 0\nprocess_start_time_seconds {start}\n'
        connection.send(whole(200, page.encode()))

    backend.control[b"/metrics"] = metrics
    return seen


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
async def test_a_url_of_several_engines_is_reported_once_and_keeps_slots_and_record(
    backend: ScriptedBackend, starts: tuple[float, ...]
) -> None:
    seen = plays_several(backend, starts)
    usage = {"prompt_tokens": 1800, "completion_tokens": 1, "total_tokens": 1801}
    backend.plays(*answer(200, completion("ok") | {"usage": usage}))
    sections = {"routing": {"policy": "prefix"}, "health": {"slow_start_seconds": 60}}
    async with running(backend, sections=sections, per_backend={"max_in_flight": 64}) as under_test:
        found = under_test.backend(backend)
        await holds(lambda: found.restarts.several, "it is noticed")
        prompt = chat("A prompt with a prefix. " * 300)
        await under_test.ask(prompt)
        before = seen[0]
        await holds(lambda: seen[0] > before + 4, "more looks")
        again = await under_test.ask(prompt)
        assert int(again.header("x-gateway-prefix-tokens") or 0) > 500
        assert sum(engine.slots for engine in found.engines) == 64
        assert [event["log_level"] for event in under_test.events if event["event"] == "several_engines"] == ["warning"]


async def test_gateway_check_reports_it(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    plays_several(backend, (2000.0, 1000.0))
    plays_several(other, (2000.0,))
    reports = (await examine(parse({"backends": [{"url": backend.url}, {"url": other.url}]})))["backends"]
    warned = [any("everal engines answer" in warning for warning in report["warnings"]) for report in reports]
    assert warned == [True, False]
