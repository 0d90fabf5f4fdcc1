"""The gateway is replaced by a new process while clients use it: none of them notices."""

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from gateway.features.handover.channel import address_of, connect
from loadtest.servers.processes import free_ports
from tests.clients import Client, chat, request
from tests.fault.restartable import Restartable, restartable
from tests.fault.rig import holds
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import answer, chunk, head, json_answer, last_chunk, stream, until

STREAM = chat(stream=True)


def held_stream(event: asyncio.Event) -> list[Any]:
    """A stream that ends when the test wants it."""
    first = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    return [head(200), chunk(first), until(event), chunk(first), chunk(b"data: [DONE]\n\n"), last_chunk()]


async def starts(client: Client, body: bytes = STREAM) -> None:
    await client.send(request(body))


async def streams(client: Client, backend: ScriptedBackend) -> None:
    """Begin the only stream that runs there."""
    await starts(client)
    await holds(lambda: backend.running == 1, "the stream runs")


async def test_streams_go_on_and_clients_keep_their_connections(tmp_path: Path, backend: ScriptedBackend) -> None:
    end = asyncio.Event()
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        old = gateway.processes[0].pid
        idle = [await gateway.client() for _ in range(20)]
        for client in idle:
            await client.send(request(chat()))
            assert (await client.answer()).status == 200
        backend.plays_once(*held_stream(end))
        async with await gateway.client() as streaming:
            await streams(streaming, backend)
            new = await gateway.restart()
            assert new != old
            for client in idle:  # the new process answers on the same connections
                await client.send(request(chat()))
                assert (await client.answer()).status == 200
            assert gateway.processes[0].poll() is None  # it has its stream
            end.set()
            assert (await streaming.answer()).is_done
            await gateway.ended(old)
            await streaming.send(request(chat()))
            assert (await streaming.answer()).status == 200
        for client in idle:
            client.close()
        shown = await gateway.asks_admin("/admin/backends", b"GET")
        assert shown.json["backends"][0]["state"] == "up"


async def test_no_request_fails_and_no_cap_is_exceeded_while_restarts_follow_each_other(
    tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(*stream(12, seconds_apart=0.02))
    async with restartable(tmp_path, backend, other, cap=3) as gateway:
        stopped, done = asyncio.Event(), list[bool]()

        async def user(is_lasting: bool) -> None:
            while not stopped.is_set():
                async with await gateway.client() as client:
                    for _ in range(5 if is_lasting else 1):
                        await starts(client)
                        done.append((await client.answer()).is_done)

        users = [asyncio.create_task(user(number % 2 == 0)) for number in range(14)]
        processes = [await gateway.restart() for _ in range(4)]
        await asyncio.sleep(0.3)
        stopped.set()
        await asyncio.gather(*users)
        assert all(done)
        assert len(set(processes)) == 4
        assert max(backend.most_running, other.most_running) == 3


async def test_what_waits_in_the_old_process_is_served_before_what_came_later(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    async with restartable(tmp_path, backend, cap=2) as gateway:
        backend.plays_once(*held_stream(first))
        backend.plays_once(*held_stream(second))
        backend.plays(*json_answer())
        clients = [await gateway.client() for _ in range(4)]
        for client in clients[:2]:
            await starts(client)
        await holds(lambda: backend.running == 2, "both slots are in use")
        await clients[2].send(request(chat("waits in the old process")))
        await gateway.asks_admin("/admin/queue", b"GET")
        await gateway.restart()
        await clients[3].send(request(chat("came later")))
        await asyncio.sleep(0.3)
        assert len(backend.ledger) == 2
        first.set()
        assert (await clients[0].answer()).is_done
        assert [(await client.answer()).status for client in clients[2:]] == [200, 200]
        bodies = [seen.body for seen in backend.ledger[2:]]
        assert [b"waits in the old" in body for body in bodies] == [True, False]
        second.set()
        assert (await clients[1].answer()).is_done
        assert backend.most_running == 2
        for client in clients:
            client.close()


async def test_three_generations_share_the_slots(tmp_path: Path, backend: ScriptedBackend) -> None:
    ends = [asyncio.Event() for _ in range(3)]
    async with restartable(tmp_path, backend, cap=3) as gateway:
        clients: list[Client] = []
        generations = [gateway.processes[0].pid]
        for number, end in enumerate(ends):  # each process has one stream
            backend.plays_once(*held_stream(end))
            clients.append(await gateway.client())
            await starts(clients[number])
            await holds(lambda number=number: backend.running == number + 1, "the stream runs")
            generations.append(await gateway.restart())
        backend.plays(*json_answer())
        clients.append(await gateway.client())
        await clients[3].send(request(chat()))
        await asyncio.sleep(0.3)
        assert backend.running == backend.most_running == 3
        ends[1].set()  # of the second process
        assert (await clients[1].answer()).is_done
        assert (await clients[3].answer()).status == 200
        ends[0].set()
        assert (await clients[0].answer()).is_done
        await gateway.ended(generations[0])
        await gateway.ended(generations[1])
        ends[2].set()
        assert (await clients[2].answer()).is_done
        await gateway.ended(generations[2])
        for client in clients:
            client.close()
        assert backend.most_running == 3


async def test_a_new_process_that_fails_leaves_everything_as_it_was(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        right = gateway.file.read_text()
        gateway.file.write_text(f"{right}routing: {{aging: -1}}\n")
        refused = await gateway.asks_admin("/admin/restart")
        assert refused.status == 400
        assert f"{gateway.file}:" in refused.error["message"]
        assert "routing.aging" in refused.error["message"]
        with socket.create_server(("127.0.0.1", 0)) as taken:
            gateway.file.write_text(right)
            gateway.rewrite(server={"host": "127.0.0.1", "port": taken.getsockname()[1], "admin": None})
            failed = await gateway.asks_admin("/admin/restart")
            assert failed.status == 500
            assert (failed.error["code"], "exit code 1" in failed.error["message"]) == ("restart_failed", True)
        assert (await gateway.ask(chat())).status == 200
        gateway.file.write_text(right)
        await gateway.restart()
        assert (await gateway.ask(chat())).status == 200


async def test_a_second_serve_with_the_same_file_takes_over(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        first = gateway.processes[0]
        gateway.start()
        assert await asyncio.to_thread(first.wait, 20) == 0
        assert (await gateway.ask(chat())).status == 200
        await holds(lambda: bool(gateway.events("handed_over")), "it is logged")
        assert [event["pid"] for event in gateway.events("handed_over")] == [gateway.processes[1].pid]


async def test_another_address_in_the_file_is_bound_by_the_new_process(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        (port,) = free_ports(1)
        admin = {"port": gateway.admin_port, "allowed_hosts": ["gateway"]}
        gateway.rewrite(server={"host": "127.0.0.1", "port": port, "admin": admin})
        await gateway.restart()
        gateway.port = port
        assert (await gateway.ask(chat())).status == 200


async def test_what_the_old_process_knew_is_known(
    tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    keys = [{"name": "alice", "key": "sk-alice-1", "requests_per_minute": 4}]
    async with restartable(tmp_path, backend, other, auth={"keys": keys}) as gateway:
        key = b"authorization: Bearer sk-alice-1"
        for each in (backend, other):
            each.plays(*answer(200, {"id": "resp_1", "object": "response", "output": []}))
        body = orjson.dumps({"model": MODEL, "input": "Hello"})
        assert (await gateway.ask(body, key, target=b"/v1/responses")).status == 200
        stored = backend if backend.ledger else other
        name = stored.url.removeprefix("http://")
        assert (await gateway.asks_admin(f"/admin/backends/{name}/drain")).status == 200
        await gateway.restart()
        shown = await gateway.asks_admin("/admin/backends", b"GET")
        assert {each["name"]: each["draining"] for each in shown.json["backends"]}[name] == "by hand"
        await gateway.asks_admin(f"/admin/backends/{name}/undrain")
        found = await gateway.ask(b"", key, method=b"GET", target=b"/v1/responses/resp_1")
        assert (found.status, len(stored.ledger)) == (200, 2)
        assert [(await gateway.ask(chat(), key)).status for _ in range(3)] == [200, 200, 429]


async def test_requests_that_run_in_the_old_process_count_for_their_key(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    keys = [{"name": "alice", "key": "sk-alice-1", "max_concurrent_requests": 1}]
    end = asyncio.Event()
    backend.plays_once(*held_stream(end))
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend, auth={"keys": keys}) as gateway, await gateway.client() as streaming:
        key = b"authorization: Bearer sk-alice-1"
        await streaming.send(request(STREAM, key))
        await holds(lambda: backend.running == 1, "the stream runs")
        await gateway.restart()
        assert (await gateway.ask(chat(), key)).status == 429
        end.set()
        assert (await streaming.answer()).is_done

        async def is_admitted() -> bool:
            return (await gateway.ask(chat(), key)).status == 200

        for _ in range(100):
            if await is_admitted():
                break
            await asyncio.sleep(0.05)
        assert await is_admitted()


async def test_the_new_process_may_die_while_the_old_one_ends_its_streams(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    end = asyncio.Event()
    backend.plays_once(*held_stream(end))
    async with restartable(tmp_path, backend) as gateway, await gateway.client() as streaming:
        await streams(streaming, backend)
        os.kill(await gateway.restart(), signal.SIGKILL)
        end.set()
        assert (await streaming.answer()).is_done
        assert await asyncio.to_thread(gateway.processes[0].wait, 20) == 0


async def test_the_old_process_may_die_and_its_slots_are_free(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays_once(*held_stream(asyncio.Event()))
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend, cap=1) as gateway, await gateway.client() as streaming:
        await streams(streaming, backend)
        await gateway.restart()
        gateway.processes[0].kill()
        assert (await gateway.ask(chat())).status == 200


async def test_both_end_when_they_are_told_to(tmp_path: Path, backend: ScriptedBackend) -> None:
    end = asyncio.Event()
    backend.plays_once(*held_stream(end))
    async with restartable(tmp_path, backend) as gateway, await gateway.client() as streaming:
        await streams(streaming, backend)
        new = await gateway.restart()
        for pid in (new, gateway.processes[0].pid):
            os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(0.2)
        end.set()
        assert (await streaming.answer()).is_done
        await gateway.ended(new)
        assert await asyncio.to_thread(gateway.processes[0].wait, 20) == 0


async def test_what_was_learned_is_read_at_a_cold_start(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    state = tmp_path / "state"
    async with restartable(tmp_path, backend, state={"path": str(state)}) as gateway:
        name = backend.url.removeprefix("http://")
        await gateway.asks_admin(f"/admin/backends/{name}/drain")
        await stops(gateway)
        assert [file.name for file in state.iterdir()] == ["gateway.snapshot"]
        gateway.start()
        await holds(lambda: len(gateway.events("serving")) == 2, "it serves")
        shown = await gateway.asks_admin("/admin/backends", b"GET")
        assert shown.json["backends"][0]["draining"] == "by hand"
        await stops(gateway)
        (state / "gateway.snapshot").write_bytes(b"gateway snapshot 999\n")
        gateway.start()
        await gateway.ready()
        await holds(lambda: bool(gateway.events("snapshot_ignored")), "it is logged")
        reasons = [event["reason"] for event in gateway.events("snapshot_ignored")]
        assert reasons == ["another version of the gateway wrote it"]
        assert (await gateway.ask(chat())).status == 200


async def stops(gateway: Restartable) -> None:
    gateway.processes[-1].terminate()
    assert await asyncio.to_thread(gateway.processes[-1].wait, 20) == 0


class Manager:
    """What systemd is for a service: a socket for its states, and sockets that it passes on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.setblocking(False)

    async def hears(self) -> str:
        async with asyncio.timeout(20):
            return (await asyncio.get_running_loop().sock_recv(self._socket, 1000)).decode()

    def close(self) -> None:
        self._socket.close()


async def test_systemd_hears_of_the_start_the_new_process_and_the_stop(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    manager = Manager(tmp_path)
    async with restartable(tmp_path, backend, environment={"NOTIFY_SOCKET": str(manager.path)}) as gateway:
        assert await manager.hears() == "READY=1"
        pid = await gateway.restart()
        assert {await manager.hears(), await manager.hears()} == {"READY=1", f"MAINPID={pid}"}
        os.kill(pid, signal.SIGTERM)
        assert await manager.hears() == "STOPPING=1"
    manager.close()


def sockets_of(pid: int) -> int:
    """How many sockets a process has."""
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(file).startswith("socket:")
    return found


async def test_thousands_of_idle_clients_move_and_no_process_keeps_them(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        clients = [await gateway.client() for _ in range(3000)]
        generations = [gateway.processes[0].pid]
        for _ in range(2):
            generations.append(await gateway.restart())
            await gateway.ended(generations[-2])
        for client in clients[::100]:
            await client.send(request(chat()))
            assert (await client.answer()).status == 200
        for client in clients:
            client.close()
        await holds(lambda: sockets_of(generations[-1]) < 100, "the sockets of clients that left are closed")


async def test_a_new_process_that_is_stopped_before_it_serves_leaves_everything_as_it_was(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        backend.control[b"/health"] = until(asyncio.Event())  # so that it waits before it takes over
        second = gateway.start()
        await holds(lambda: bool(gateway.events("handing_over")), "it has asked")
        second.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(second.wait, 20) == 1
        assert gateway.processes[0].poll() is None
        assert (await gateway.ask(chat())).status == 200
        gateway.log_file.write_text(gateway.log_file.read_text().replace("Traceback", "traceback"))


async def test_the_old_process_may_be_stopped_while_the_new_one_gets_ready(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    end = asyncio.Event()
    backend.plays_once(*held_stream(end))
    async with restartable(tmp_path, backend) as gateway, await gateway.client() as streaming:
        await streams(streaming, backend)
        backend.control[b"/health"] = until(asyncio.Event())
        second = gateway.start()
        await holds(lambda: bool(gateway.events("handing_over")), "it has asked")
        gateway.processes[0].terminate()
        assert await asyncio.to_thread(second.wait, 30) == 1  # it does not serve beside one that stops
        end.set()
        assert (await streaming.answer()).is_done


async def test_odd_peers_change_nothing(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        address = address_of(gateway.file, "127.0.0.1", gateway.port)
        for first, second in (({}, {}), ({"is": "hello", "protocol": 1, "format": 1}, {"is": "nonsense"})):
            peer = connect(address)
            assert peer is not None
            peer.post(first, [os.dup(0)])
            peer.post(second)
            while (message := await peer.receive()) is not None:
                message.close()
            peer.close()
        assert gateway.processes[0].poll() is None
        await gateway.restart()
        assert (await gateway.ask(chat())).status == 200
        gateway.log_file.write_text(gateway.log_file.read_text().replace("Traceback", "traceback"))


async def test_a_change_by_hand_while_the_new_process_gets_ready_is_kept(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    async with restartable(tmp_path, backend) as gateway:
        healthy = asyncio.Event()
        backend.control[b"/health"] = until(healthy)
        second = gateway.start()
        await holds(lambda: bool(gateway.events("handing_over")), "it has asked")
        name = backend.url.removeprefix("http://")
        assert (await gateway.asks_admin(f"/admin/backends/{name}/drain")).status == 200
        del backend.control[b"/health"]
        healthy.set()
        await holds(lambda: bool(gateway.events("handed_over")), "it has taken over")
        assert gateway.events("handed_over")[0]["pid"] == second.pid
        shown = await gateway.asks_admin("/admin/backends", b"GET")
        assert shown.json["backends"][0]["draining"] == "by hand"
