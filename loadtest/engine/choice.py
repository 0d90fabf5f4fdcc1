"""One answer that is being generated: its length, how it ends, and its text token by token."""

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final

from loadtest.engine.kv_cache import BlockContent, SequenceState
from loadtest.engine.request_parameters import SamplingParams, Steering
from loadtest.engine.tokens import BYTES_PER_TOKEN, OutputKeys, TokenisedText, detokenise, tokenise

# Three letters a word: with the space before it, a token.
_LETTERS: Final = (
    "theandforyouanycanhadherwasoneouroutdaygethashimhishowmannewnowoldseetwowaywho"
    "boydiditsletputsayshetoousesunskyseaiceoakelmfoxowlcatdoghenbeeantairfogmuddew"
    "logmappeninkcupjarkeyboxbaghatcapnetrod"
)
_WORDS: Final = tuple(" " + _LETTERS[i : i + 3] for i in range(0, len(_LETTERS), 3))
_NONCE: Final = re.compile(r"nonce:([A-Za-z0-9_-]{1,64})")
_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_FIRST_TOKENS: Final = frozenset((*(word.encode() for word in _WORDS), b"nonc"))  # of answers
_MOST_REPLAYED_TOKENS: Final = 8192


def find_nonce(prompt: str) -> str | None:
    """The last `nonce:<word>` in the prompt: the answer repeats it, so a client can prove that it is its own."""
    found = None
    for found in _NONCE.finditer(prompt):  # noqa: B007
        pass
    return found.group(1) if found else None


@dataclass(frozen=True, slots=True)
class Prose:
    """The answer to one prompt, token by token."""

    seed: int
    opening: Sequence[str] = ()
    first: int = 0  # the number of its first token: those before are part of the prompt

    @classmethod
    def saying(cls, seed: int, text: str) -> "Prose":
        """An answer of this text, which has ASCII characters alone."""
        return cls(seed, tuple(text[i : i + BYTES_PER_TOKEN] for i in range(0, len(text), BYTES_PER_TOKEN)))

    @classmethod
    def of(cls, seed: int, nonce: str | None, max_tokens: int) -> "Prose":
        """An answer that begins with the nonce, in as many tokens as there are at most."""
        if nonce is None or max_tokens < 1:
            return cls(seed)
        text = f"nonce:{nonce}"
        pieces = [text[i : i + BYTES_PER_TOKEN] for i in range(0, len(text), BYTES_PER_TOKEN)]
        if len(pieces) > max_tokens:
            pieces[max_tokens - 1 :] = ["".join(pieces[max_tokens - 1 :])]
        return cls(seed, tuple(pieces))

    def token(self, index: int) -> str:
        """The text of the answer's token number `index`."""
        index += self.first
        opening = self.opening
        if index < len(opening):
            return opening[index]
        mixed = (self.seed ^ (index * _MULTIPLIER)) * _MULTIPLIER
        return _WORDS[(mixed >> 40) % len(_WORDS)]

    def text(self, start: int, stop: int) -> str:
        """The text of the tokens from `start` up to `stop`."""
        token = self.token
        return "".join([token(index) for index in range(start, stop)])

    def packed(self, start: int, stop: int) -> bytes:
        """The tokens from `start` up to `stop` as the tokeniser would pack them."""
        width = BYTES_PER_TOKEN
        return b"".join(self.token(i).encode()[:width].ljust(width, b"\0") for i in range(start, stop))


_SHORTEST_NATURAL_TOKENS: Final = 16
_NATURAL_SPREAD_TOKENS: Final = 240


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """An answer's plan: `pieces` holds the text of each token if a stop string cut it, else the prose has it."""

    index: int
    _: KW_ONLY
    prompt: TokenisedText
    prose: Prose
    sequence: SequenceState
    finish_reason: str
    stop_reason: str | None = None
    words: int = 0
    pieces: Sequence[str] | None = None
    # The data-parallel rank requested by the client, None for any.
    rank: int | None = None
    tool: str | None = None  # the called tool, with the text as its arguments
    # For the statistics: the longest it may get, and how many answers the prompt gets, if this is the first of them.
    limit_tokens: int | None = None
    first_of: int | None = None

    def text(self, start: int, stop: int) -> str:
        """The text of the tokens from `start` up to `stop`; an end-of-sequence token has none."""
        if self.pieces is not None:
            return "".join(self.pieces[start:stop])
        return self.prose.text(start, min(stop, self.words))

    def token_texts(self, start: int, stop: int) -> list[str]:
        """The same, a string a token."""
        return [self.text(index, index + 1) for index in range(start, stop)]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The ids of the tokens from `start` up to `stop`."""
        ids = []
        for piece in self.token_texts(start, stop):
            packed = tokenise(piece or "<|im_end|>").ids()
            ids.append(packed[0])
        return ids


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt ready for the engine. `replayed_tokens` at its end are the beginning of the answer to the rest."""

    tokens: TokenisedText
    _: KW_ONLY
    keys: Sequence[int]
    parent_key: int
    seed: int  # of the answer, by the prompt without its replayed part
    nonce: str | None
    lora_name: str | None = None
    cache_salt: str | None = None
    replayed_tokens: int = 0


def find_replayed(packed: bytes, seed_of: Callable[[bytes], int]) -> int:
    """The number of tokens at the end of a prompt that equal the engine's answer to the rest of it."""
    width = BYTES_PER_TOKEN
    for start in range(max(width, len(packed) - _MOST_REPLAYED_TOKENS * width), len(packed), width):
        if packed[start : start + width] in _FIRST_TOKENS:
            prompt, count = packed[:start], (len(packed) - start) // width
            prose = Prose.of(seed_of(prompt), find_nonce(detokenise(prompt)), _MOST_REPLAYED_TOKENS)
            if prose.packed(0, count) == packed[start:]:
                return count
    return 0


def plan_choice(
    index: int,
    sequence_id: int,
    prompt: PreparedPrompt,
    sampling: SamplingParams,
    limit_tokens: int,
    block_size: int,
    forced_tokens: int | None = None,
) -> Choice:
    """Decide an answer's length and end: at `limit_tokens`, at a stop string, or where the model would stop itself."""
    replayed = prompt.replayed_tokens
    limit_tokens += replayed
    seed = prompt.seed ^ (index * 0x5851F42D4C957F2D) ^ sampling.seed
    prescribed = sampling.prescription
    if prescribed is not None:
        prose = Prose.saying(seed, prescribed.text(seed))
        natural = len(prose.opening) + 1
    else:
        prose = Prose.of(seed, prompt.nonce, limit_tokens)
        natural = _SHORTEST_NATURAL_TOKENS + (seed >> 7) % _NATURAL_SPREAD_TOKENS
        natural = max(natural, sampling.min_tokens + replayed, len(prose.opening) + 1)
        if forced_tokens is not None:
            natural = forced_tokens
    if natural > limit_tokens or (sampling.ignore_eos and prescribed is None):
        words = output_tokens = limit_tokens
        reason = "length"
    else:
        words, output_tokens, reason = natural - 1, natural, "stop"
    if replayed and prescribed is None:
        prose = replace(prose, first=replayed)
        words, output_tokens = max(0, words - replayed), max(1, output_tokens - replayed)
    pieces, stop = _cut_at_stop(prose, words, sampling)
    if pieces is not None:
        output_tokens, reason = len(pieces), "stop"
    keys = prompt.keys
    tail = prompt.tokens.packed[len(keys) * block_size * BYTES_PER_TOKEN :]
    output_keys = OutputKeys(
        keys[-1] if keys else prompt.parent_key, tail, prose.packed, output_tokens=words, block_size=block_size
    )
    sequence = SequenceState(
        sequence_id=sequence_id,
        prompt_tokens=prompt.tokens.num_tokens,
        output_tokens=output_tokens,
        prompt_keys=keys,
        output_keys=lambda: output_keys,
    )
    tool = prescribed.tool if prescribed is not None else None
    if prescribed is not None and prescribed.must_call and reason == "stop":
        reason = "tool_calls"
    return Choice(
        index,
        prompt=prompt.tokens,
        prose=prose,
        sequence=sequence,
        finish_reason=reason,
        stop_reason=stop,
        words=words,
        pieces=pieces,
        tool=tool,
        limit_tokens=limit_tokens - replayed,
    )


def content_of(choice: Choice, prompt: PreparedPrompt, lora_id: int | None, steering: Steering) -> BlockContent:
    """The contents of KV events for the blocks of an answer and its prompt."""
    return BlockContent(
        prompt.tokens,
        choice.prose.packed,
        lora_name=prompt.lora_name,
        lora_id=lora_id,
        cache_salt=prompt.cache_salt,
        session_id=steering.session_id,
        reports_hits=steering.reports_hits,
    )


def _cut_at_stop(prose: Prose, words: int, sampling: SamplingParams) -> tuple[list[str] | None, str | None]:
    """The answer up to the first stop string, with the token that completes it, and that string; None without any."""
    pieces = [prose.token(i) for i in range(words)] if sampling.stop else []
    text = "".join(pieces)
    found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
    if not found:
        return None, None
    cut, stop = min(found)
    kept: list[str] = []
    position = 0
    for piece in pieces:
        kept.append(piece[: max(0, cut - position)])
        position += len(piece)
        if position >= cut + len(stop) and len(kept) >= sampling.min_tokens:
            break
    return kept, stop
