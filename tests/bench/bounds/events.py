"""KV events of an engine that stores half a million blocks at once."""

import time

import msgspec
import zmq

_BLOCKS = 540_000
_BLOCK_TOKENS = 4
_PAUSE_SECONDS = 0.5


def payload() -> bytes:
    """One message of about 15 MB."""
    hashes = [(number * 0x9E3779B97F4A7C15) & (1 << 64) - 1 for number in range(_BLOCKS)]
    tokens = [1 << 16] * (_BLOCKS * _BLOCK_TOKENS)
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": _BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "group_idx": 0,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


def publish(port: int, seconds: float) -> int:
    """Publish such messages for a while; gives the size of one."""
    message, ends = payload(), time.monotonic() + seconds
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind(f"tcp://127.0.0.1:{port}")
    sequence = 0
    while time.monotonic() < ends:
        time.sleep(_PAUSE_SECONDS)  # the gateway connects meanwhile
        socket.send_multipart([b"", sequence.to_bytes(8, "big"), message])
        sequence += 1
    time.sleep(_PAUSE_SECONDS)
    context.destroy(linger=0)
    return len(message)
