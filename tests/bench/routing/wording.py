"""Text for the blocks of a trace: a block always has the same words, and each word is one token of the model."""

from collections.abc import Sequence

import aiohttp
from xxhash import xxh3_128_intdigest

from tests.bench.routing.trace import BLOCK_TOKENS, Row

FEWEST_WORDS = 32
_TIMES = 8  # a tokenizer that cuts by length could pass with a single word
_CANDIDATES = """
the of and to in is that it was for on are as with they at be this from have or by one had not but what all were
when we there can an your which their if do will each about how up out them then she many some so these would other
into has more two like see time could no make than first been its who now my made over down only way find use may
long little very after words called just where most know get through back much before also around another come work
three word must because does part even place well such here take why things help put years different away again off
old number tell small every found still between name should home big give line set own under read last never us left
end along while might next below something both few those always show large often together going want important
until form keep children side without once enough four head above kind page got need far hand high year parts let
following being second times since days hard better best during others however sure means try act add any bad bar
bet bit box cap cat cut day due ear fit fix fun hit key law log low man map men met mix net new nor odd oil our pay
per pen raw red row run sum ten top too van via war web win yes yet you zip boy her him his say let its cup jar
"""


class WrongTokens(Exception):
    """The model's tokenizer does not cut the text as the trace needs it; the message says how."""


class Wording:
    """Texts within a namespace: two namespaces share no block, so a cache that knows one is cold for the other.

    A word comes with the space before it, as tokenizers have it, so that no token spans two words or two blocks.
    """

    def __init__(self, words: Sequence[str], namespace: str) -> None:
        self._words = tuple(f" {word}" for word in words)
        self._namespace = namespace
        self._blocks: dict[int, str] = {}

    def prompt(self, row: Row, index: int) -> str:
        """The prompt of a row: its blocks, then a tail that only the request of this index has."""
        return "".join(map(self._block, row.hash_ids)) + self._drawn(f"tail-{index}", row.tail_tokens)

    def warm_up(self, index: int, tokens: int) -> str:
        """A prompt that shares no block with any other."""
        return self._drawn(f"warm-up-{index}", tokens)

    def _block(self, block: int) -> str:
        text = self._blocks.get(block)
        if text is None:
            text = self._blocks[block] = self._drawn(f"block-{block}", BLOCK_TOKENS)
        return text

    def _drawn(self, label: str, tokens: int) -> str:
        """Words drawn by the digits of a hash: the same in every process and on every version of Python."""
        words, base = self._words, len(self._words)
        parts: list[str] = []
        for start in range(0, tokens, BLOCK_TOKENS):
            number = xxh3_128_intdigest(f"{self._namespace}/{label}/{start}".encode())
            for _ in range(min(BLOCK_TOKENS, tokens - start)):
                number, digit = divmod(number, base)
                parts.append(words[digit])
        return "".join(parts)


async def words_of(url: str, model: str) -> list[str]:
    """The candidates that are one token of a model, as its server's /tokenize says. Raises WrongTokens."""
    async with aiohttp.ClientSession(base_url=url) as session:
        candidates = dict.fromkeys(_CANDIDATES.split())
        words = [word for word in candidates if await _count(session, model, f" {word}" * _TIMES) == _TIMES]
    if len(words) < FEWEST_WORDS:
        raise WrongTokens(f"only {len(words)} of the words are one token of {model}; {FEWEST_WORDS} are needed")
    return words


async def check(url: str, model: str, wording: Wording, rows: Sequence[Row]) -> None:
    """That prompts have as many tokens as their rows say. Raises WrongTokens."""
    async with aiohttp.ClientSession(base_url=url) as session:
        for index, row in enumerate(rows):
            counted = await _count(session, model, wording.prompt(row, index))
            if counted != row.input_tokens:
                raise WrongTokens(f"a prompt of {row.input_tokens} tokens in the trace has {counted} in {model}")


async def _count(session: aiohttp.ClientSession, model: str, text: str) -> int:
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    async with session.post("/tokenize", json=body) as response:
        response.raise_for_status()
        return int((await response.json())["count"])
