"""Two chat engines with the same model and one embeddings engine: simulated, or real vLLM on this CPU."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.servers import server
from loadtest.servers.processes import free_ports
from loadtest.servers.server import Server
from loadtest.vllm_cpu.process import VllmOptions, VllmProcess

CHAT_MODEL = "tiny"
EMBEDDING_MODEL = "minilm"
CONTEXT_TOKENS = 8192
MODELS = Path(".models")
CHAT_FLAGS = ("--model", CHAT_MODEL, "--max-model-len", str(CONTEXT_TOKENS), "--block-size", "32", "--responses-store")
# A model with random weights would write endless white space where a JSON schema allows it.
REAL_CHAT_FLAGS = (
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-tokenizer-info-endpoint",
)
STORES_RESPONSES = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}


def name_of(engine: Server) -> str:
    """Its name, as the gateway gives it by default."""
    return urlsplit(engine.url).netloc


def print_progress(line: str) -> None:
    """Shown with `pytest -s`, and when a test fails."""
    sys.stderr.write(f"{line}\n")


@dataclass(frozen=True)
class Fleet:
    """Where the engines are."""

    chat_urls: tuple[str, str]
    embedding_url: str

    @property
    def urls(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.chat_urls, self.embedding_url)

    @property
    def chat_names(self) -> set[str]:
        """The chat engines' names, as the gateway gives them by default."""
        return {urlsplit(url).netloc for url in self.chat_urls}


@contextmanager
def real_fleet(logs: Path) -> Iterator[Fleet]:
    """Real vLLM engines; they start side by side."""
    tiny, minilm = MODELS / CHAT_MODEL, MODELS / EMBEDDING_MODEL
    chat = VllmOptions(tiny, flags=REAL_CHAT_FLAGS, environment=STORES_RESPONSES)
    options = [chat, chat, VllmOptions(minilm, kv_events=False)]
    engines = [VllmProcess(each, logs / f"vllm-{number}.log", print_progress) for number, each in enumerate(options)]
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield Fleet((engines[0].url, engines[1].url), engines[2].url)


def simulated_engine(logs: Path, *flags: str, port: int = 0) -> Server:
    """One simulated engine in a process of its own, for the block."""
    port = port or free_ports(1)[0]
    return server.simulated_engine(flags, logs / f"sim-{port}.log", port)


@contextmanager
def simulated_fleet(logs: Path) -> Iterator[Fleet]:
    """Simulated engines with the same models' names and limits."""
    embedding = ("--model", EMBEDDING_MODEL, "--max-model-len", "256", "--embedding")
    with ExitStack() as stack:
        urls = [
            stack.enter_context(simulated_engine(logs, *flags)).url for flags in (CHAT_FLAGS, CHAT_FLAGS, embedding)
        ]
        yield Fleet((urls[0], urls[1]), urls[2])


def spare_engine(kind: str, logs: Path) -> Server:
    """One more chat engine, for a test that ends it."""
    if kind == "sim":
        return simulated_engine(logs, *CHAT_FLAGS)
    return VllmProcess(VllmOptions(MODELS / CHAT_MODEL), logs / "vllm-spare.log", print_progress)
