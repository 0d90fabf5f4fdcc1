"""The command with a kubeconfig: pods come, are replaced, and no client of the OpenAI SDK notices."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import AsyncOpenAI

from loadtest.servers.server import Server
from tests.integration.fleet import CHAT_FLAGS, CHAT_MODEL, simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, gateway_holds_nothing, samples
from tests.kubernetes_api import ApiServer, Document, endpoint_slice, pod

pytestmark = pytest.mark.simulated("real engines take a minute to start, and behave the same here")
CLIENTS = 8


def pods(engine: Server, *endpoints: Document) -> Document:
    port = urlsplit(engine.url).port
    assert port is not None
    return endpoint_slice(f"vllm-{port}", *endpoints, ports=[("http", port)])


@asynccontextmanager
async def gateway_before(api: ApiServer, folder: Path) -> AsyncIterator[Gateway]:
    """The command beside this event loop, on which the API server runs."""
    source = {"service": "vllm", "port": "http", "kubeconfig": str(api.kubeconfig(folder, "token"))}
    config = {"discovery": {"kubernetes": [source]}, "health": {"probe_interval_seconds": 0.5, "slow_start_seconds": 0}}
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, running_gateway(folder, config))
        await asyncio.to_thread(stack.close)


async def backends_become(gateway: Gateway, *names: str) -> None:
    async def reached() -> bool:
        found = await samples(gateway.admin_url)
        up = {each.labels["backend"] for each in found if each.name == "gateway_backend_up" and each.value == 1}
        return up == set(names)

    await eventually(reached, f"{names} are up, and no others")


async def stream_of(sdk: AsyncOpenAI, number: int) -> tuple[str, str | None]:
    """The backend of a stream, and how it ended."""
    messages = [{"role": "user", "content": f"question {number}"}]
    call = sdk.chat.completions.with_raw_response
    raw = await call.create(model=CHAT_MODEL, messages=messages, max_tokens=60, stream=True)  # type: ignore[call-overload]
    finish = None
    async for part in raw.parse():
        for choice in part.choices:
            finish = choice.finish_reason or finish
    return raw.headers["x-gateway-backend"], finish


async def until(condition: Callable[[], bool], what: str) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds, what)


async def test_pods_are_replaced_while_clients_stream(tmp_path: Path) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(simulated_engine(tmp_path, *CHAT_FLAGS)) for _ in range(2)]
        async with ApiServer(token="token") as api:
            api.put(pods(engines[0], pod("vllm-a")))
            async with gateway_before(api, tmp_path) as gateway, gateway.client() as sdk:
                await backends_become(gateway, "vllm-a")
                ended: list[tuple[str, str, str | None]] = []  # the phase when it began, its backend, and its end
                phase, enough = "a", asyncio.Event()

                async def client(number: int) -> None:
                    while not enough.is_set():
                        during = phase
                        ended.append((during, *await stream_of(sdk, number)))

                def served(during: str, backend: str) -> bool:
                    return (during, backend) in {each[:2] for each in ended}

                async with asyncio.TaskGroup() as group:
                    for number in range(CLIENTS):
                        group.create_task(client(number))
                    await until(lambda: served("a", "vllm-a"), "the first pod serves")
                    phase = "a, b"
                    api.put(pods(engines[1], pod("vllm-b")))
                    await until(lambda: served("a, b", "vllm-b"), "the second pod serves")
                    api.put(pods(engines[0], pod("vllm-a", ready=False, terminating=True)))
                    await backends_become(gateway, "vllm-b")  # the first one has left: its streams have ended
                    phase = "b"
                    await asyncio.to_thread(engines[0].stop)
                    await until(lambda: served("b", "vllm-b"), "clients go on")
                    enough.set()
                assert {finish for _, _, finish in ended} <= {"length", "stop"}  # none was cut
                assert {backend for during, backend, _ in ended if during == "b"} == {"vllm-b"}
                await gateway_holds_nothing(gateway.admin_url)
