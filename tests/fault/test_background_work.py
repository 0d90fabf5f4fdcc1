"""Exceptions in background work and in listeners: counted and logged, and everything goes on."""

from typing import Any

import pytest

from gateway import BUILD
from gateway.core import core
from gateway.core.feedback import CacheState
from gateway.core.relay.upstream import UpstreamResponse
from tests.clients import chat, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import hang, head, reset


def errors_in(under_test: UnderTest) -> list[str]:
    """Tasks that failed, by the log; the rig would take them for defects."""
    found = [event["task"] for event in under_test.events if event["event"] == "background_error"]
    under_test.expects_internal_errors = True
    return found


async def test_a_consumer_that_raises_keeps_no_line_and_no_count_of_a_request_back(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: Any) -> None:
        raise OverflowError

    monkeypatch.setattr(CacheState, "learn", faulty)
    async with running(backend) as under_test:
        await under_test.ask()
        await holds(lambda: len(under_test.log.getvalue().splitlines()) == 1, "its line")
        await under_test.ask()
        assert under_test.outcomes == {"completed": 2}
        assert under_test.gateway.core.supervisor.faults == {"finished_requests": 2}
        assert errors_in(under_test) == ["finished_requests"]


async def test_a_fault_in_following_sizes_does_not_end_settling(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_SIZES_SECONDS", 0.1)
    async with running(backend) as under_test:

        def faulty() -> None:
            raise RuntimeError

        with monkeypatch.context() as patched:
            patched.setattr(under_test.gateway.core.cache_state, "follow_sizes", faulty)
            await holds(lambda: "follow_sizes" in under_test.gateway.core.supervisor.faults, "the fault")
        await under_test.ask()
        await holds(lambda: len(under_test.log.getvalue().splitlines()) == 1, "its line")
        assert errors_in(under_test) == ["follow_sizes"]


async def test_what_a_listener_of_the_fleet_raises_reaches_no_request(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    sections = {"health": {"eject_failures": 1, "eject_base_seconds": 0.1}}
    async with running(backend, other, sections=sections) as under_test:

        def faulty() -> None:
            raise ValueError("two engines have the same engine")

        fleet, heard = under_test.gateway.core.fleet, list[int]()
        fleet.on_change.insert(0, faulty)
        fleet.on_change.append(lambda: heard.append(1))
        backend.plays(reset())
        assert [(await under_test.ask()).status for _ in range(2)] == [200, 200]
        assert heard, "the listener behind it heard of the ejection"
        assert errors_in(under_test) == ["fleet_change"]


@pytest.mark.skipif(BUILD == "compiled", reason="replaces a method of a compiled class")
async def test_a_fault_about_one_answer_leaves_the_others_watched(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.plays(head(200), hang())
    sections = {"upstream": {"first_byte_timeout_seconds": 1.0}}
    watch, poor = UpstreamResponse.watch, set[UpstreamResponse]()

    def faulty(response: UpstreamResponse, *settings: Any, **named: Any) -> None:
        if not poor:
            poor.add(response)
        if response in poor:
            raise RuntimeError
        watch(response, *settings, **named)

    monkeypatch.setattr(UpstreamResponse, "watch", faulty)
    async with running(backend, sections=sections) as under_test:
        async with await under_test.client() as unlucky, await under_test.client() as other:
            await unlucky.send(request(chat(stream=True)))
            await holds(lambda: bool(poor), "it is watched")
            await other.send(request(chat(stream=True)))
            assert (await other.answer()).error["code"] == "backend_timeout"
        assert set(under_test.gateway.core.supervisor.faults) == {"answer_watch"}
        assert errors_in(under_test) == ["answer_watch"]
