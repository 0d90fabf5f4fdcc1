"""Record what a real engine publishes about its prefix cache into tests/contract/recordings/kv_events*.json.

usage: python -m tests.contract.record_kv_events       needs `python -m loadtest.vllm_cpu.install` once

The first session is a stock engine whose cache is so small that blocks are reused; the second has two data-parallel
ranks and publishes block hashes as bytes.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import zmq

from loadtest.vllm_cpu.process import VllmOptions, VllmProcess
from tests.contract.cases import CHAT_PATH, COMPLETION_PATH, MODEL, Case, get
from tests.contract.exchange import ask
from tests.contract.record import say
from tests.contract.recording import MODELS, save_json

LOGS = Path(".venv-vllm/logs")
SILENCE_MILLISECONDS = 400  # longer than the publisher's pause between two looks at its queue
DEADLINE_MILLISECONDS = 10_000
PARTS = re.compile("_(bucket|created)[{]")
SMALL_CACHE = ("--num-gpu-blocks-override", "17")  # block 0 is never given out
SYSTEM = "You read the standard library of Python aloud. Say what each import is for, and say it briefly. " * 2
FIRST = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "import sys"}]
SECOND = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "import os and nothing else, please"}]
OTHERS = [
    [{"role": "user", "content": f"{name} def read(self, size=-1): " * 12}] for name in ("one", "two", "three", "four")
]
TWO_BLOCKS = list(range(300, 364))


def chat(name: str, messages: list[dict[str, str]], headers: dict[str, str] | None = None, **fields: Any) -> Case:
    """A short answer, with the ids of its tokens."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    return Case(name, CHAT_PATH, {**body, **fields}, headers=headers or {})


def complete(name: str, prompt: list[int], **fields: Any) -> Case:
    """A completion of token ids."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    return Case(name, COMPLETION_PATH, {**body, **fields})


STOCK = (
    chat("cold", FIRST),
    chat("same", FIRST),
    chat("same_prefix", SECOND),
    chat("salted", FIRST, cache_salt="tenant-a"),
    chat("long_output", FIRST, max_tokens=70, ignore_eos=True),
    chat("reported", SECOND, vllm_xargs={"kv_cache_report_mode": "full"}),
    complete("whole_blocks", TWO_BLOCKS, session_id="session-a"),
    # The last token is always computed anew, and with it a second copy of the last block.
    complete("whole_blocks_again", TWO_BLOCKS),
    *(chat(f"other_{number}", messages) for number, messages in enumerate(OTHERS)),
    Case("reset", "/reset_prefix_cache", {}),
    chat("after_reset", FIRST),
)
RANKS = (
    *(chat(f"rank_{rank}", FIRST, headers={"X-data-parallel-rank": rank}) for rank in ("0", "1", "2", "-1", "bad")),
    chat("rank_2_stream", FIRST, headers={"X-data-parallel-rank": "2"}, stream=True),
)


def frames_of(subscriber: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    """What arrives until silence."""
    while subscriber.poll(SILENCE_MILLISECONDS):
        yield subscriber.recv_multipart()


def shown(frames: list[bytes]) -> dict[str, Any]:
    """The three frames of a batch as text."""
    topic, seq, payload = frames
    return {"topic": topic.decode(), "seq": seq.hex(), "payload": payload.hex()}


@contextmanager
def sockets(options: VllmOptions, ranks: int) -> Iterator[tuple["zmq.Socket[bytes]", list["zmq.Socket[bytes]"]]]:
    """A subscriber to all ranks, and a replay client for each."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        replays = []
        for rank in range(ranks):
            subscriber.connect(f"tcp://{options.host}:{options.kv_events_port + rank}")
            monitor.recv_multipart()
            replays.append(context.socket(zmq.DEALER))
            replays[-1].connect(f"tcp://{options.host}:{options.kv_replay_port + rank}")
        yield subscriber, replays


def replayed(client: "zmq.Socket[bytes]", start: int) -> list[list[str]]:
    """All frames of an answer to a replay request, the end marker included."""
    client.send_multipart([b"", start.to_bytes(8, "big")])
    messages = []
    while client.poll(DEADLINE_MILLISECONDS):
        messages.append([frame.hex() for frame in client.recv_multipart()])
        if messages[-1][2] == "ff" * 8:
            return messages
    raise TimeoutError("no end marker")


def record(name: str, options: VllmOptions, cases: tuple[Case, ...], ranks: int, replay_starts: list[int]) -> None:
    """One session: each request with what it makes the engine publish."""
    with VllmProcess(options, LOGS / f"record-{name}.log", say) as engine:
        options = engine.options
        with sockets(options, ranks) as (subscriber, replays):
            list(frames_of(subscriber))
            exchanges = []
            for case in cases:
                answer = ask(engine.url, case)
                exchange: dict[str, Any] = {"name": case.name, "request": {"path": case.path, **(case.body or {})}}
                exchange |= {"headers": dict(case.headers), "status": answer["status"]}
                exchange["answer"] = next((answer[kind] for kind in ("json", "events", "text") if kind in answer), None)
                if case.path == CHAT_PATH:
                    body = {"model": MODEL, "messages": (case.body or {})["messages"]}
                    exchange["tokenize"] = ask(engine.url, Case("tokenize", "/tokenize", body))["json"]
                exchange["batches"] = [shown(frames) for frames in frames_of(subscriber)]
                exchanges.append(exchange)
                say(f"{answer['status']} {case.name}: {len(exchange['batches'])} batches")
            session = {
                "version": ask(engine.url, get("version", "/version"))["json"]["version"],
                "block_size": options.block_size_tokens,
                "kv_event_sources": ask(engine.url, get("sources", "/kv_event_sources"))["json"],
                "exchanges": exchanges,
                "replays": [
                    {"rank": rank, "start": start, "messages": replayed(client, start)}
                    for rank, client in enumerate(replays)
                    for start in replay_starts
                ],
            }
            if ranks > 1:
                page = ask(engine.url, get("metrics", "/metrics"))["text"].splitlines()
                session["metrics"] = [line for line in page if line.startswith("vllm:") and not PARTS.search(line)]
    save_json(name, session)


def main() -> int:
    """Both sessions, one after the other."""
    dev_mode = {"VLLM_SERVER_DEV_MODE": "1"}
    tiny = MODELS / MODEL
    stock = VllmOptions(tiny, max_num_seqs=4, max_model_len_tokens=512, flags=SMALL_CACHE, environment=dev_mode)
    if "--ranks" not in sys.argv:
        record("kv_events", stock, STOCK, 1, [0, 3, 1000])
    two = VllmOptions(
        tiny,
        max_num_seqs=4,
        max_model_len_tokens=512,
        flags=("--data-parallel-size", "2"),
        environment={**dev_mode, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    )
    if "--stock" in sys.argv:
        return 0
    record("kv_events_ranks", two, RANKS, 2, [0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
