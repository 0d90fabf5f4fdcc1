"""A model's own tokenizer and chat template, as Hugging Face's `transformers` loads them.

Runs in the tokenizer process alone: importing the library takes seconds, and rendering and encoding hold the
interpreter's lock, which would stall an event loop in the same process.

Texts are encoded piece by piece, so that earlier pieces are looked up. A tokenizer cuts a text at its added tokens
first. A text that is cut there, each piece beginning with such a token, has the same ids piece by piece as whole; only
the last turn of a conversation is a new piece.
"""

import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gateway.routing.exact_index import TOKEN_BYTES, packed
from gateway.tokenization.conversation import ContentFormat, NotUnderstood, Reading, read

Encode = Callable[[list[str]], list[bytes]]
_ENTRY_BYTES = 200  # what an entry takes besides its text and its ids


class AddedToken(NamedTuple):
    """A text that is one token wherever it stands, and what of its surroundings it heeds."""

    content: str
    heeds_left: bool = False  # eats white space before it, or must not touch a word
    normalized: bool = False  # looked for in the normalized text


def cut_marks(tokens: Sequence[AddedToken], rendered: Iterable[str]) -> tuple[str, ...]:
    """The added tokens before which a text may be cut; of the many that some models have, those in use."""
    every = [token.content for token in tokens if token.content]
    texts = list(rendered)
    return tuple(
        token.content
        for token in tokens
        if token.content
        and not token.heeds_left
        and not token.normalized
        and any(token.content in text for text in texts)
        and not any(_hides(other, token.content) for other in every)
    )


def _hides(other: str, token: str) -> bool:
    """Whether finding `other` can keep `token` from being found where it stands."""
    if other == token:
        overlaps = range(1, len(token))
        return any(token.startswith(token[-length:]) for length in overlaps)
    if token in other:
        return True
    return any(token.startswith(other[-length:]) for length in range(1, min(len(other), len(token))))


class Segments:
    """The ids of texts, with a memory of pieces that is bounded in bytes; the least recently used goes first."""

    def __init__(self, encode: Encode, marks: Sequence[str], capacity_bytes: int) -> None:
        self.seen = 0
        self.cached = 0
        self.used_bytes = 0
        self._encode = encode
        self._cut = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._capacity_bytes = capacity_bytes
        self._known: OrderedDict[str, bytes] = OrderedDict()

    def tokens(self, text: str) -> bytes:
        """The packed ids of a text."""
        pieces = self._pieces(text)
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._known]
        fresh = dict(zip(new, self._encode(new), strict=True)) if new else {}
        self.seen += len(pieces)
        self.cached += len(pieces) - len(new)
        found = []
        for piece in pieces:
            ids = fresh.get(piece)
            if ids is None:
                ids = self._known[piece]
                self._known.move_to_end(piece)
            found.append(ids)
        self._remember(fresh)
        return b"".join(found)

    def _pieces(self, text: str) -> Sequence[str]:
        if self._cut is None:
            return (text,)
        edges = [0, *(match.start() for match in self._cut.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(edges) if start < end]

    def _remember(self, fresh: dict[str, bytes]) -> None:
        for piece, ids in fresh.items():
            self._known[piece] = ids
            self.used_bytes += _size(piece, ids)
        while self.used_bytes > self._capacity_bytes:
            self.used_bytes -= _size(*self._known.popitem(last=False))


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
_SAMPLE_CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": " Hi \n"},
        {"role": "assistant", "content": "\n\nHe\u0301llo.  "},
        {"role": "user", "content": "Bye"},
    ],
)


class CannotLoad(Exception):
    """There is no usable tokenizer there; the message says why."""


class ModelTokenizer:
    """Tells the tokens of one model's prompts."""

    def __init__(self, source: str, cache_bytes: int) -> None:
        self._tokenizer = _load(source)
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._splits_special = bool(self._tokenizer.split_special_tokens)
        self._backend = backend
        self._frame = self._special_frame()
        marks = self._marks()
        segments = Segments(self._encode_all, marks, cache_bytes)
        self.segmented = bool(marks) and all(
            segments.tokens(text) == self._encode(text) for text in self._awkward_texts(marks)
        )
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
        """How many tokens each text has by itself."""
        return list(map(len, self._backend.encode_batch_fast(texts, add_special_tokens=special)))

    def render(self, reading: Reading) -> str:
        """The text of a prompt. Raises NotUnderstood where the template refuses it or there is none."""
        if reading.text is not None:
            return reading.text
        return self._render(reading.messages, tools=reading.tools, **reading.variables)

    def _render(self, messages: list[dict[str, Any]], **more: Any) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **more)
        except Exception as error:  # whatever a template does with what it is given
            raise NotUnderstood(f"the chat template says: {error or type(error).__name__}") from error
        if type(text) is not str:
            raise NotUnderstood("the chat template gives no text")
        return text

    def _encode(self, text: str, special: bool = False) -> bytes:
        return packed(self._backend.encode(text, add_special_tokens=special).ids)

    def _encode_all(self, texts: list[str]) -> list[bytes]:
        return [packed(found.ids) for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _special_frame(self) -> tuple[bytes, bytes] | None:
        """What special tokens stand before and after every text; None if that depends on the text."""
        with_special, bare = self._encode(_SAMPLES[0], special=True), self._encode(_SAMPLES[0])
        at = with_special.find(bare)
        before, after = with_special[:at], with_special[at + len(bare) :]
        alike = all(self._encode(text, special=True) == before + self._encode(text) + after for text in _SAMPLES)
        return (before, after) if at >= 0 and at % TOKEN_BYTES == 0 and alike else None

    def _marks(self) -> tuple[str, ...]:
        if self._splits_special:
            return ()
        tokens = [
            AddedToken(token.content, token.lstrip or token.single_word, token.normalized)
            for token in self._backend.get_added_tokens_decoder().values()
        ]
        return cut_marks(tokens, self._sample_prompts())

    def _sample_prompts(self) -> Iterator[str]:
        for messages in _SAMPLE_CHATS:
            for content_format in ContentFormat:
                try:
                    reading = read("chat", {"messages": messages}, content_format)
                    yield self.render(reading)
                except NotUnderstood:
                    continue

    def _awkward_texts(self, marks: Sequence[str]) -> Iterator[str]:
        """Texts that would show it if pieces influenced each other."""
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
    except Exception as error:  # the library raises what it likes
        raise CannotLoad(f"{source} cannot be loaded: {error or type(error).__name__}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise CannotLoad(f"{source} has no fast tokenizer (tokenizer.json)")
    return tokenizer
