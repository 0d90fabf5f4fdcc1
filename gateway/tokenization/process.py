"""Questions to the tokenizer process, both ends of them. A message is its length, then MessagePack."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, Final

import msgspec

LENGTH_BYTES: Final = 4


class LoadTokenizer(msgspec.Struct, tag=True, frozen=True):
    """Make a model's tokenizer ready."""

    model: str
    source: str


class Job(msgspec.Struct, tag=True, frozen=True):
    """Tokenize a prompt. `features` may be rendered; a prompt with another one is refused."""

    model: str
    endpoint: str
    document: dict[str, Any]
    content_format: str
    features: list[str]


class Count(msgspec.Struct, tag=True, frozen=True):
    """Count the tokens of several texts, each by itself. `special`: with the special tokens that the model adds."""

    model: str
    texts: list[str]
    special: bool


Question = LoadTokenizer | Job | Count


class TokenizerReply(msgspec.Struct, frozen=True):
    """The answer to a question: packed ids (for `Count`, `counts` instead), or no `tokens` and a `reason`."""

    tokens: bytes | None = None
    reason: str = ""
    failed: bool = False  # by a fault, not because the prompt is unsupported
    counts: list[int] = []


def framed(message: Question | TokenizerReply) -> bytes:
    """A message as it is sent. Raises TypeError or OverflowError for what MessagePack cannot hold."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def length_of(prefix: bytes) -> int:
    return int.from_bytes(prefix, "little")


read_question: Callable[[bytes], Question] = msgspec.msgpack.Decoder(Question).decode
read_answer: Callable[[bytes], TokenizerReply] = msgspec.msgpack.Decoder(TokenizerReply).decode


def serve(questions: BinaryIO, answers: BinaryIO, answer: Callable[[Question], TokenizerReply]) -> None:
    """Answer questions, one after the other, until there are no more."""
    while len(prefix := questions.read(LENGTH_BYTES)) == LENGTH_BYTES:
        answers.write(framed(answer(read_question(questions.read(length_of(prefix))))))
        answers.flush()


# Variables for a process's modules, its cache, and a hub behind a proxy. Nothing else of the environment is passed on:
# it may contain the keys of clients and backends.
_INHERITED: Final = (
    "PATH PYTHONPATH PYTHONHOME VIRTUAL_ENV LD_LIBRARY_PATH HOME USER TMPDIR LANG LC_ALL XDG_CACHE_HOME SSL_CERT_FILE"
    " SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy"
    " no_proxy all_proxy TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE"
)
COMMAND: Final = (sys.executable, "-m", "gateway.tokenization.tokenizer")
_QUIET: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
HUNG_SECONDS: Final = 10.0
_IN_HAND: Final = 2  # questions sent and not yet answered, so that the process never waits for the next one


class ProcessEnded(Exception):
    """The tokenizer process ended before it answered, or does not run."""


class TokenizerProcess:
    """Runs the process, and asks it questions, which it answers in their order."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._process: Process | None = None
        self._turns = asyncio.Semaphore(_IN_HAND)
        self._asked: deque[tuple[asyncio.Future[TokenizerReply | None], asyncio.TimerHandle]] = deque()

    async def run(self, started: Callable[[], None]) -> None:
        """Run the process until it ends or the call is cancelled. Raises OSError if it cannot be started."""
        allowed = _INHERITED.split()
        inherited = {name: value for name, value in os.environ.items() if name in allowed or name.startswith("HF_")}
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, env=inherited | _QUIET)
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        started()
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    prefix = await process.stdout.readexactly(LENGTH_BYTES)
                    self._answered(read_answer(await process.stdout.readexactly(length_of(prefix))))
        finally:
            self._process = None
            while self._asked:
                self._answered(None)
            _kill(process)
            process.stdin.close()
            reaping = asyncio.get_running_loop().create_task(process.wait())
            try:
                await asyncio.shield(reaping)
            finally:  # also when cancelled meanwhile: a killed process takes no time to speak of
                await reaping

    async def ask(self, question: Question, hung_seconds: float = HUNG_SECONDS) -> TokenizerReply:
        """The answer to a question. Raises ProcessEnded, and what `framed` raises.

        The answer to a cancelled call is dropped. A process that takes longer than `hung_seconds` is killed.
        """
        await self._turns.acquire()  # released when the question is answered, or the process has ended
        try:
            if self._process is None or self._process.stdin is None:
                raise ProcessEnded
            message = framed(question)
        except Exception:
            self._turns.release()
            raise
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[TokenizerReply | None] = loop.create_future()
        self._asked.append((answered, loop.call_later(hung_seconds, _kill, self._process)))
        self._process.stdin.write(message)
        if (answer := await answered) is None:
            raise ProcessEnded
        return answer

    def _answered(self, answer: TokenizerReply | None) -> None:
        """Answer the oldest question; None = the process has ended."""
        answered, timer = self._asked.popleft()
        timer.cancel()
        self._turns.release()
        if not answered.done():  # it was not cancelled
            answered.set_result(answer)


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
