"""Messages with open files between two processes."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.features.handover.channel import Channel, address_of, connect, listen


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Channel, Channel]]:
    one, other = (Channel(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield one, other
    one.close()
    other.close()


async def test_messages_arrive_in_order_with_their_files(ends: tuple[Channel, Channel], tmp_path: Path) -> None:
    one, other = ends
    (tmp_path / "file").write_text("content")
    one.post({"is": "first", "use": (1, 2)}, [os.open(tmp_path / "file", os.O_RDONLY)])
    one.post({"is": "second"})
    first, second = await other.receive(), await other.receive()
    assert first is not None
    assert second is not None
    assert first.content == {"is": "first", "use": [1, 2]}
    assert os.read(first.files[0], 100) == b"content"
    first.close()
    assert (second.content, second.files) == ({"is": "second"}, [])


async def test_what_the_other_end_does_not_read_yet_is_kept(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    for number in range(500):
        one.post({"number": number, "text": "x" * 5000})
    await asyncio.sleep(0)
    for number in range(500):
        message = await other.receive()
        assert message is not None
        assert message.content["number"] == number


async def test_an_end_that_is_closed_is_noticed_and_files_are_closed(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    waiting = asyncio.create_task(other.receive())
    await asyncio.sleep(0)
    one.close()
    assert await waiting is None
    reader, writer = os.pipe()
    other.post({"is": "late"}, [writer])
    assert os.read(reader, 1) == b""  # the writing end is closed
    os.close(reader)
    one.close()  # twice is as good as once


async def test_a_process_is_found_by_its_address(tmp_path: Path) -> None:
    address = address_of(tmp_path / "gateway.yaml", "127.0.0.1", 8080)
    assert connect(address) is None
    with listen(address):
        channel = connect(address)
        assert channel is not None
        assert channel.is_own
        assert channel.pid == os.getpid()
        channel.close()
        with listen(address):  # nobody can take the name of another
            pass
    assert connect(address) is None


SQUATTER = """
import os, socket, sys
os.setuid(65534)
held = []
for name in sys.argv[1:]:
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    held[-1].bind(bytes.fromhex(name))
    held[-1].listen(0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
async def test_another_user_who_takes_addresses_first_is_passed_over(tmp_path: Path) -> None:
    address = address_of(tmp_path / "gateway.yaml", "127.0.0.1", 8080)
    taken = [address, *[b"%b-%d" % (address, number) for number in range(20)]]
    command = [sys.executable, "-c", SQUATTER, *[name.hex() for name in taken]]
    squatter = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert squatter.stdin is not None
    assert squatter.stdout is not None
    assert await squatter.stdout.readline() == b"ready\n"
    assert connect(address) is None
    with listen(address):
        channel = connect(address)
        assert channel is not None
        assert channel.pid == os.getpid()
        channel.close()
    squatter.stdin.close()
    await squatter.wait()


def test_another_file_or_port_is_another_address(tmp_path: Path) -> None:
    one, link = tmp_path / "one.yaml", tmp_path / "current.yaml"
    link.symlink_to(one)
    addresses = {address_of(one, "h", 1), address_of(one, "h", 2), address_of(tmp_path / "two.yaml", "h", 1)}
    assert len(addresses) == 3
    before = address_of(link, "h", 1)
    link.unlink()
    link.symlink_to(tmp_path / "two.yaml")  # another release
    assert address_of(link, "h", 1) == before


async def test_what_was_sent_before_the_other_end_left_is_received(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    other.post({"is": "never read"})
    for number in range(3):
        one.post({"number": number})
    one.close()
    other.post({"is": "late"})
    received = [await other.receive() for _ in range(4)]
    assert [message and message.content["number"] for message in received] == [0, 1, 2, None]


async def test_a_message_of_any_length_arrives(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    reader, writer = os.pipe()
    one.post({"text": "x" * 3_000_000}, [writer])
    message = await other.receive()
    assert message is not None
    assert (len(message.content["text"]), len(message.files)) == (3_000_000, 1)
    assert not os.get_inheritable(message.files[0])
    message.close()
    assert os.read(reader, 1) == b""
    os.close(reader)


async def test_files_of_a_message_that_cannot_be_read_are_closed(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    reader, writer = os.pipe()
    socket.send_fds(one._socket, [b"\xc1"], [writer])
    os.close(writer)
    with pytest.raises(msgspec.DecodeError):
        await other.receive()
    assert os.read(reader, 1) == b""
    os.close(reader)
