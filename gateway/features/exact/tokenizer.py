"""The tokenizer process: renders and encodes prompts with a model's own tokenizer and chat template.

It is a process of its own because importing Hugging Face's `transformers` takes seconds, and rendering and encoding
hold the interpreter's lock, which would stall an event loop. `TokenizerProcess` runs it and sends requests; `main`
answers them from standard input, one after the other, until its end. A message is its length, then MessagePack.

Texts are encoded piece by piece, so that earlier pieces are looked up. A tokenizer cuts a text at its added tokens
first. A text cut there, each piece beginning with such a token, has the same ids piece by piece as whole; only the last
turn of a conversation is a new piece.
"""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from gateway.features.exact.conversation import PROBES, ContentFormat, NotUnderstood, PromptFeature, Reading, read
from gateway.features.exact.index import TOKEN_BYTES, packed

if TYPE_CHECKING:
    from tokenizers import AddedToken

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
    """The bytes of a message. Raises TypeError or OverflowError for values outside MessagePack."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def length_of(prefix: bytes) -> int:
    return int.from_bytes(prefix, "little")


read_question: Callable[[bytes], Question] = msgspec.msgpack.Decoder(Question).decode
read_answer: Callable[[bytes], TokenizerReply] = msgspec.msgpack.Decoder(TokenizerReply).decode


# Variables for a process's modules, its cache, and a hub behind a proxy. Nothing else of the environment is passed on:
# it may contain the keys of clients and backends.
_INHERITED: Final = (
    "PATH PYTHONPATH PYTHONHOME VIRTUAL_ENV LD_LIBRARY_PATH HOME USER TMPDIR LANG LC_ALL XDG_CACHE_HOME SSL_CERT_FILE"
    " SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy"
    " no_proxy all_proxy TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE"
)
COMMAND: Final = (sys.executable, "-m", "gateway.features.exact.tokenizer")
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
HUNG_SECONDS: Final = 10.0
_IN_HAND: Final = 2  # questions sent and not yet answered, so that the process never waits for the next one


class ProcessEnded(Exception):
    """The tokenizer process ended before it answered, or does not run."""


class TokenizerProcess:
    """Runs the process, and sends it requests, which it answers in order."""

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

    def end(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            _kill(self._process)

    async def ask(self, question: Question, hung_seconds: float = HUNG_SECONDS) -> TokenizerReply:
        """The answer to a question. Raises ProcessEnded, and the errors of `framed`.

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


CACHE_BYTES: Final = 67108864  # for each model
Encode = Callable[[list[str]], list[bytes]]
_ENTRY_BYTES = 200  # size of an entry besides its text and its ids


def cut_marks(tokens: Collection["AddedToken"], rendered: Iterable[str]) -> tuple[str, ...]:
    """The added tokens before which a text may be cut; only the used ones, as some models have many.

    Excluded: tokens that consume white space before them, must not touch a word, or match the normalized text.
    """
    every, texts = [token.content for token in tokens if token.content], list(rendered)
    simple = [each.content for each in tokens if not (each.lstrip or each.single_word or each.normalized)]
    used = [mark for mark in simple if mark and any(mark in text for text in texts)]
    return tuple(mark for mark in used if not any(_hides(other, mark) for other in every))


def _hides(other: str, token: str) -> bool:
    """Whether finding `other` can keep `token` from being found where it stands."""
    if token in other and token != other:
        return True
    return any(token.startswith(other[-length:]) for length in range(1, min(len(other), len(token))))


class Segments:
    """The ids of texts, with an LRU cache of pieces that is bounded in bytes."""

    def __init__(self, encode: Encode, marks: Sequence[str], capacity_bytes: int) -> None:
        self.used_bytes = 0
        self._encode = encode
        self._cut = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._capacity_bytes = capacity_bytes
        self._known: OrderedDict[str, bytes] = OrderedDict()

    def tokens(self, text: str) -> bytes:
        """The packed ids of a text."""
        pieces, new = self._pieces(text), dict[str, None]()
        for piece in pieces:
            if piece in self._known:
                self._known.move_to_end(piece)
            else:
                new[piece] = None
        for piece, ids in zip(new, self._encode(list(new)), strict=True):
            self._known[piece] = ids
            self.used_bytes += _size(piece, ids)
        tokens = b"".join(self._known[piece] for piece in pieces)
        while self.used_bytes > self._capacity_bytes:
            self.used_bytes -= _size(*self._known.popitem(last=False))
        return tokens

    def _pieces(self, text: str) -> Sequence[str]:
        if self._cut is None:
            return (text,)
        edges = [0, *(match.start() for match in self._cut.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(edges) if start < end]


def _size(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + len(ids) + _ENTRY_BYTES


_SAMPLES = (
    "a",
    "Two words. 3.14 = pi; žluťoučký kůň",
    " leading and trailing \n\n",
    "e\u0301 \u200d 日本語 🧑\u200d🚀\t\r\n",
    "\u2581x\u2581",
    "",
)


class CannotLoad(Exception):
    """The source has no usable tokenizer; the message gives the reason."""


class ModelTokenizer:
    """Tokenizes the prompts of one model."""

    def __init__(self, source: str, cache_bytes: int) -> None:
        self._tokenizer = _load(source)
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = splits_special = bool(self._tokenizer.split_special_tokens)
        self._backend = backend
        self._frame = self._special_frame()
        added = () if splits_special else backend.get_added_tokens_decoder().values()
        marks = cut_marks(added, self._sample_prompts())
        segments = Segments(self._encode_all, marks, cache_bytes)
        texts = self._awkward_texts(marks)
        self.segmented = bool(marks) and all(segments.tokens(text) == self._encode(text) for text in texts)
        self.segments = segments if self.segmented else Segments(self._encode_all, (), cache_bytes)

    def tokens(self, endpoint: str, document: dict[str, Any], content_format: str, features: list[str]) -> bytes:
        """The packed ids of a request's prompt. Raises NotUnderstood, also where the template refuses it."""
        reading = read(endpoint, document, content_format)
        if unlike := reading.features.difference(features):
            raise NotUnderstood(f"not verified against the backends: {', '.join(sorted(unlike))}")
        text = self.render(reading)
        if not reading.add_special_tokens:
            return self.segments.tokens(text)
        if self._frame is None:
            return self._encode(text, special=True)
        before, after = self._frame
        return before + self.segments.tokens(text) + after

    def counts(self, texts: list[str], *, special: bool) -> list[int]:
        return list(map(len, self._backend.encode_batch_fast(texts, add_special_tokens=special)))

    def render(self, reading: Reading) -> str:
        """The text of a prompt. Raises NotUnderstood where the template refuses it or there is none."""
        if reading.text is not None:
            return reading.text
        apply = self._tokenizer.apply_chat_template
        try:
            text = apply(reading.messages, tokenize=False, tools=reading.tools, **reading.variables)
        except Exception as error:  # templates raise errors of any kind
            raise NotUnderstood(f"the chat template says: {error or type(error).__name__}") from error
        if type(text) is not str:
            raise NotUnderstood("the chat template gives no text")
        return text

    def _encode(self, text: str, special: bool = False) -> bytes:
        return packed(self._backend.encode(text, add_special_tokens=special).ids)

    def _encode_all(self, texts: list[str]) -> list[bytes]:
        return [packed(found.ids) for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _special_frame(self) -> tuple[bytes, bytes] | None:
        """The special tokens before and after every text; None if they depend on the text."""
        with_special, bare = self._encode(_SAMPLES[0], special=True), self._encode(_SAMPLES[0])
        at = with_special.find(bare)
        before, after = with_special[:at], with_special[at + len(bare) :]
        alike = all(self._encode(text, special=True) == before + self._encode(text) + after for text in _SAMPLES)
        return (before, after) if at >= 0 and at % TOKEN_BYTES == 0 and alike else None

    def _sample_prompts(self) -> Iterator[str]:
        chats = [dict(probe.document) for probe in PROBES if probe.feature is PromptFeature.CHAT]
        for document, content_format in product(chats, ContentFormat):
            with suppress(NotUnderstood):
                yield self.render(read("chat", document, content_format))

    def _awkward_texts(self, marks: Sequence[str]) -> Iterator[str]:
        """Texts that would show whether pieces affect each other."""
        yield from self._sample_prompts()
        for mark in marks:
            yield from (mark + sample + mark + mark + sample for sample in _SAMPLES)
            yield from (sample + mark for sample in _SAMPLES)
            yield mark[:-1] + mark + mark[1:]


def _load(source: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CannotLoad(f"transformers cannot be imported: {error}") from error
    load: Callable[..., Any] = AutoTokenizer.from_pretrained
    try:
        tokenizer = load(source, trust_remote_code=False, local_files_only=os.path.isdir(source))
    except Exception as error:  # the library raises arbitrary errors
        raise CannotLoad(f"{source} cannot be loaded: {error or type(error).__name__}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise CannotLoad(f"{source} has no fast tokenizer (tokenizer.json)")
    return tokenizer


class Worker:
    """The models' tokenizers."""

    def __init__(self, load: Callable[[str, int], ModelTokenizer]) -> None:
        self._load = load
        self._models: dict[str, ModelTokenizer] = {}

    def answer(self, question: Question) -> TokenizerReply:
        try:
            if isinstance(question, LoadTokenizer):
                self._models[question.model] = model = self._load(question.source, CACHE_BYTES)
                return TokenizerReply(b"", "in segments" if model.segmented else "as a whole")
            if question.model not in self._models:
                raise CannotLoad(f"the tokenizer of {question.model} is not loaded")
            model = self._models[question.model]
            if isinstance(question, Count):
                return TokenizerReply(b"", counts=model.counts(question.texts, special=question.special))
            return TokenizerReply(
                model.tokens(question.endpoint, question.document, question.content_format, question.features)
            )
        except (CannotLoad, NotUnderstood) as error:
            return TokenizerReply(None, str(error), isinstance(error, CannotLoad))
        except Exception as error:  # one prompt's fault must not end the others' service
            return TokenizerReply(None, f"{type(error).__name__}: {error}", True)


def serve(questions: BinaryIO, answers: BinaryIO, answer: Callable[[Question], TokenizerReply]) -> None:
    """Answer questions, one after the other, until there are no more."""
    while len(prefix := questions.read(LENGTH_BYTES)) == LENGTH_BYTES:
        answers.write(framed(answer(read_question(questions.read(length_of(prefix))))))
        answers.flush()


def main() -> None:
    """Serve the gateway that started this process. Other prints to standard output go to standard error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it is the gateway that ends this process, by closing its input
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb") as questions, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(sys.stderr.fileno(), 1)
        serve(questions, answers, Worker(ModelTokenizer).answer)


if __name__ == "__main__":
    main()
