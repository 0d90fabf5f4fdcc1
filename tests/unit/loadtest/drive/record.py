"""Records how a server streams chats: `python -m tests.unit.loadtest.drive.record URL MODEL USERS > FILE`.

A line for each of USERS chats at once: the reads of its connection as [seconds after the request, bytes as text].
"""

from __future__ import annotations

import asyncio
import json
import sys
from urllib.parse import urlsplit

_MAX_TOKENS = 24
_READ_BYTES = 65_536


async def _chat(url: str, model: str, user: int) -> list[tuple[float, str]]:
    address = urlsplit(url)
    said = {"role": "user", "content": f"{user}: tell me of light and water"}
    fields = {"model": model, "messages": [said], "max_tokens": _MAX_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    clock = asyncio.get_running_loop().time
    sent = clock()
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    reads = []
    while data := await reader.read(_READ_BYTES):
        reads.append((round(clock() - sent, 6), data.decode("latin-1")))
    writer.close()
    return reads


async def _record(url: str, model: str, users: int) -> None:
    await _chat(url, model, users)  # compiles and warms up
    for reads in await asyncio.gather(*(_chat(url, model, user) for user in range(users))):
        sys.stdout.write(json.dumps(reads) + "\n")


if __name__ == "__main__":
    asyncio.run(_record(sys.argv[1], sys.argv[2], int(sys.argv[3])))
