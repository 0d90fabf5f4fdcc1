import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

from gateway.config import HealthConfig
from gateway.core.backends.facts import Facts
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.probe import BackendWatches
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import EngineDead

from .scripted import METRICS, Scripted, hang, json_answer, pour, text_answer
from .test_vllm_api import closed_port

QUICK = HealthConfig(probe_interval_seconds=0.05, probe_timeout_seconds=0.2, refresh_seconds=0.3)


@asynccontextmanager
async def watched(*urls: str, config: HealthConfig = QUICK) -> AsyncIterator[Fleet]:
    fleet = Fleet([BackendConfig(url=url) for url in urls], config, clock=time.monotonic, random=Random(1))
    async with BackendWatches(fleet, config, clock=time.monotonic, random=Random(2)):
        yield fleet


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_fleet_is_ready_at_once_and_learns_all_about_its_backends() -> None:
    async with Scripted() as server:
        server.answers["/server_info"] = json_answer({"vllm_config": {"scheduler_config": {"max_num_seqs": 64}}})
        async with watched(server.url, config=HealthConfig()) as fleet:
            await until(lambda: fleet.ready)
            [backend] = fleet.backends
            assert fleet.serving("m") == (backend,)
            await until(lambda: backend.telemetry and backend.facts.max_num_seqs and backend.facts.version)
            await until(lambda: backend.facts.kv_event_sources == ())
            facts = backend.facts
            assert (facts.version, facts.block_size_tokens, facts.prefix_caching) == ("0.32.0", 16, True)
            assert facts.can_admin
            assert (backend.cap, backend.kv_cache_tokens) == (64, 4096)
            assert backend.telemetry is not None
            assert (backend.telemetry.running, backend.telemetry.waiting) == (3, 1)


async def test_nothing_is_left_running_after_the_block() -> None:
    before = asyncio.all_tasks()
    async with Scripted() as server, watched(server.url, f"http://127.0.0.1:{closed_port()}") as fleet:
        await until(lambda: fleet.ready)
    assert asyncio.all_tasks() == before
    assert fleet.on_probe_wanted == fleet.on_restart == []


async def test_a_backend_that_starts_late_is_found_soon() -> None:
    port = closed_port()
    slow = HealthConfig(probe_interval_seconds=30.0)
    async with watched(f"http://127.0.0.1:{port}", config=slow) as fleet:
        await until(lambda: fleet.backends[0].health.state == "down")
        assert not fleet.ready
        async with Scripted(port):
            await until(lambda: fleet.ready)  # long before the next probe is due


async def test_hanging_and_endless_metrics_disturb_nothing() -> None:
    for answer in (hang, pour, text_answer("vllm:num_requests_running{ 3"), text_answer("", 500)):
        async with Scripted() as server, watched(server.url) as fleet:
            server.answers["/metrics"] = answer
            await until(lambda: fleet.ready)
            count = server.asked.count("/health")
            await until(lambda server=server, count=count: server.asked.count("/health") >= count + 3)
            await until(lambda server=server: server.asked.count("/metrics") >= 2)
            assert fleet.backends[0].health.state == "up"
            assert fleet.backends[0].telemetry is None


async def test_telemetry_is_dropped_when_it_is_old() -> None:
    async with Scripted() as server, watched(server.url) as fleet:
        [backend] = fleet.backends
        await until(lambda: backend.telemetry)
        server.answers["/metrics"] = text_answer("", 500)
        await until(lambda: backend.telemetry is None)
        assert backend.health.state == "up"


async def test_a_new_process_with_another_model_is_noticed() -> None:
    restarts: list[str] = []
    async with Scripted() as first, watched(first.url) as fleet:
        fleet.on_restart.append(lambda backend: restarts.append(backend.name))
        [backend] = fleet.backends
        await until(lambda: backend.facts.process_start_seconds == 1.0)
        first.answers["/metrics"] = text_answer(METRICS.format(start=2.0))
        first.answers["/v1/models"] = json_answer({"data": [{"id": "other"}]})
        await until(lambda: restarts)
        await until(lambda: fleet.serving("other"))
        assert fleet.serving("m") == ()


async def test_a_backend_that_dies_and_returns_serves_again_with_its_new_model_only() -> None:
    async with Scripted() as first, watched(first.url) as fleet:
        await until(lambda: fleet.ready)
        port = first.port
        await first.__aexit__(None, None, None)
        await until(lambda: not fleet.ready)
        assert fleet.models() != ()
        seen: list[object] = []
        fleet.on_change.append(lambda: seen.append(fleet.serving("m")))
        async with Scripted(port, start=2.0, model="other"):
            await until(lambda: fleet.serving("other"))
        assert not any(seen)


async def test_a_wrong_key_leaves_the_backend_without_models() -> None:
    async with Scripted() as server, watched(server.url) as fleet:
        server.answers["/v1/models"] = json_answer({"error": "Unauthorized"}, 401)
        await until(lambda: server.asked.count("/v1/models") >= 2)
        assert fleet.models() == ()
        assert not fleet.ready


async def test_a_missing_model_is_looked_up_soon() -> None:
    config = HealthConfig(probe_interval_seconds=30.0, refresh_seconds=300.0)
    async with Scripted() as server, watched(server.url, config=config) as fleet:
        [backend] = fleet.backends
        await until(lambda: backend.facts.version)
        server.answers["/v1/models"] = json_answer({"data": [{"id": "other"}]})
        fleet.model_missing(backend, "m")
        await until(lambda: fleet.serving("other"))


async def test_an_ejection_ends_without_any_request() -> None:
    config = QUICK.model_copy(update={"eject_base_seconds": 0.3, "probe_interval_seconds": 20.0})
    async with Scripted() as one, Scripted() as two, watched(one.url, two.url, config=config) as fleet:
        await until(lambda: len(fleet.serving("m") or ()) == 2)
        fleet.failed(fleet.backends[0], EngineDead("dead"))
        assert fleet.serving("m") == fleet.backends[1:]
        await until(lambda: len(fleet.serving("m") or ()) == 2)
        assert fleet.backends[0].limit(time.monotonic()) < fleet.backends[0].cap


async def test_a_fault_in_a_listener_does_not_end_the_watch() -> None:
    async with Scripted() as server, watched(server.url) as fleet:

        def fail() -> None:
            raise RuntimeError("listener")

        fleet.on_change.append(fail)
        await until(lambda: fleet.ready)
        fleet.on_change.remove(fail)
        await until(lambda: fleet.backends[0].facts != Facts() and fleet.backends[0].telemetry)
