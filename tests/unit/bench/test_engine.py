"""The mock engine speaks HTTP/1.1 and answers like vLLM, however its input comes."""

import asyncio
import json
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

CHAT = b'{"model":"mock","messages":[{"role":"user","content":"grp-0001 hi"}]}'


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request with a content-length."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def streamed(events: int, **more: object) -> bytes:
    """A chat request body that asks for a stream."""
    return json.dumps({"messages": [], "stream": True, "max_tokens": events, **more}).encode()


async def say(port: int, pieces: Iterable[bytes], answers: int = 1) -> list[tuple[int, bytes]]:
    """Send the pieces one by one on one connection; read the answers: (status, body)."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            return [await read_answer(reader) for _ in range(answers)]
        finally:
            writer.close()
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """One answer, by its content-length or its chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split()[1])
    if "transfer-encoding: chunked" not in head:
        return status, await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return status, body


def events_of(body: bytes) -> list[str]:
    """The data of every event of a stream."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    return [part.removeprefix("data: ") for part in parts]


async def get(port: int, path: str) -> tuple[int, bytes]:
    return (await say(port, [f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()]))[0]


async def test_a_chat_request_that_comes_byte_by_byte_is_answered(engine_port: int) -> None:
    request = post("/v1/chat/completions", CHAT)
    [(status, body)] = await say(engine_port, [request[i : i + 1] for i in range(len(request))])
    assert status == 200
    assert json.loads(body)["usage"] == {
        "prompt_tokens": 256,
        "total_tokens": 300,
        "completion_tokens": 44,
        "prompt_tokens_details": {"cached_tokens": 128},
    }
    assert 550 < len(body) < 750


async def test_a_chunked_body_is_read_with_extensions_and_trailers(engine_port: int) -> None:
    body = streamed(3)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"%x;name=value\r\n%s\r\n" % (10, body[:10]) + b"%X\r\n%s\r\n" % (len(body) - 10, body[10:])
    request = head + chunks + b"0\r\nX-Trailer: 1\r\n\r\n"
    [(status, answer)] = await say(engine_port, [request[i : i + 7] for i in range(0, len(request), 7)])
    assert status == 200
    assert len(events_of(answer)) == 4


async def test_pipelined_requests_are_answered_in_order_after_a_stream(engine_port: int) -> None:
    stream = post("/v1/chat/completions", streamed(5, seed=2))
    plain = post("/v1/chat/completions", CHAT)
    missing = post("/nowhere", b"{}")
    (first, second, third) = await say(engine_port, [stream + plain + missing], answers=3)
    assert events_of(first[1])[-1] == "[DONE]"
    assert json.loads(second[1])["object"] == "chat.completion"
    assert third == (404, b'{"detail":"Not Found"}')


async def test_a_stream_has_as_many_events_as_asked_for_then_usage_if_wanted_then_done(engine_port: int) -> None:
    body = streamed(4, stream_options={"include_usage": True})
    [(_, answer)] = await say(engine_port, [post("/v1/chat/completions", body)])
    *events, usage, done = events_of(answer)
    chunks = [json.loads(event)["choices"][0] for event in events]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert chunks[0]["delta"]["role"] == "assistant"
    assert json.loads(usage)["usage"] == {"prompt_tokens": 256, "total_tokens": 260, "completion_tokens": 4}
    assert json.loads(usage)["choices"] == []
    assert done == "[DONE]"


async def test_events_carry_the_time_they_were_sent_and_the_first_how_long_it_was_held(engine_port: int) -> None:
    [(_, answer)] = await say(engine_port, [post("/v1/chat/completions", streamed(5, seed=20))])
    contents = [json.loads(event)["choices"][0]["delta"]["content"] for event in events_of(answer)[:-1]]
    stamps = [int(content[1:20]) for content in contents]
    assert stamps == sorted(stamps)
    assert stamps[-1] - stamps[0] >= 60_000_000  # four gaps of 20 ms; one that was late shortens the next
    assert int(contents[0].partition("h")[2]) >= 20_000_000


async def test_the_connection_closes_after_the_answer_when_the_client_asks_for_it(engine_port: int) -> None:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", engine_port)
        writer.write(post("/v1/chat/completions", streamed(3), "Connection: close"))
        received = await reader.read(-1)
        writer.close()
        await writer.wait_closed()
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_client_that_expects_100_continue_gets_it(engine_port: int) -> None:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", engine_port)
        head, _, body = post("/v1/chat/completions", CHAT, "Expect: 100-continue").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_answer(reader))[0] == 200
        writer.close()
        await writer.wait_closed()


async def test_what_a_gateway_probes_looks_like_vllm(engine_port: int) -> None:
    assert (await get(engine_port, "/health"))[0] == 200
    models = json.loads((await get(engine_port, "/v1/models"))[1])
    assert models["data"][0]["id"] == "mock"
    assert "version" in json.loads((await get(engine_port, "/version"))[1])
    text = (await get(engine_port, "/metrics"))[1].decode()
    samples = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    cache = samples["vllm:cache_config_info"].labels
    assert int(cache["block_size"]) * int(cache["num_gpu_blocks"]) == int(cache["kv_cache_size_tokens"])
    assert samples["vllm:num_requests_running"].value == 0


async def test_embeddings_and_tokens_are_canned(engine_port: int) -> None:
    body = b'{"input":"abcdefgh"}'
    [(_, embeddings), (_, tokens), (_, rendered)] = await say(
        engine_port,
        [post("/v1/embeddings", body), post("/tokenize", body), post("/v1/chat/completions/render", body)],
        answers=3,
    )
    assert len(json.loads(embeddings)["data"][0]["embedding"]) == 8
    assert len(json.loads(tokens)["tokens"]) == len(body) // 4
    assert json.loads(rendered)["token_ids"] == json.loads(tokens)["tokens"]


async def test_a_stream_whose_client_leaves_is_counted_as_aborted(engine_port: int) -> None:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", engine_port)
        writer.write(post("/v1/chat/completions", streamed(100000, seed=5)))
        await reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()
        while (backend := json.loads((await get(engine_port, "/stats"))[1])["backends"][0])["aborted"] != 1:
            await asyncio.sleep(0.01)
    assert backend["running"] == 0


async def test_stats_tell_how_well_groups_stayed_together(engine_port: int) -> None:
    await say(engine_port, [post("/v1/chat/completions", CHAT)] * 3, answers=3)
    stats = json.loads((await get(engine_port, "/stats"))[1])
    assert stats["affinity"] == 1
    assert stats["backends"][0]["requests"] == 3
    await say(engine_port, [post("/reset", b"")])
    stats = json.loads((await get(engine_port, "/stats"))[1])
    assert (stats["affinity"], stats["backends"][0]["requests"]) == (0, 0)
