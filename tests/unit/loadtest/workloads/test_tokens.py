"""Prompts of exact numbers of tokens, by a tokenizer on this machine, and lengths that vary."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest.drive.options import RunOptions
from loadtest.workloads.bodies import DatasetError
from loadtest.workloads.prompts import Corpus, Prompt, SourceFile, WorkloadSpec
from loadtest.workloads.sources import source_of
from loadtest.workloads.tokens import TokenCounter, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer like those of Llama and Qwen: byte pairs within words."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([Corpus(0).text[:20_000]], trainer)
    path: Path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    made.save(str(path))
    return path


def prompts(tokenizer: Path, count: int = 20, **more: Any) -> list[Prompt]:
    source = source_of(WorkloadSpec.model_validate({"tokenizer": str(tokenizer), "prefix_tokens": 100} | more))
    return [turn.prompt for index in range(count) for turn in source.turns(index)]


@pytest.mark.parametrize("kind", ["shared-prefix", "unique", "sessions", "sharegpt"])
def test_prompts_have_exactly_the_tokens_that_are_asked_for(kind: str, tokenizer_file: Path) -> None:
    counter = load_tokenizer(str(tokenizer_file))
    for prompt in prompts(tokenizer_file, kind=kind, tail_tokens=33):
        if kind == "sharegpt":
            assert counter.count(prompt.tail) == prompt.asked_tokens
            continue
        assert counter.count(prompt.tail) == 33
        assert counter.count(prompt.prefix) in (0, 100)
    assert prompts(tokenizer_file, kind=kind) == prompts(tokenizer_file, kind=kind)


@pytest.mark.parametrize("kind", ["shared-prefix", "sessions", "texts"])
def test_lengths_spread_evenly_in_the_logarithm(kind: str, tokenizer_file: Path) -> None:
    counter = load_tokenizer(str(tokenizer_file))
    made = prompts(tokenizer_file, 40, kind=kind, tail_tokens=8, most_tail_tokens=256)
    lengths = [counter.count(prompt.tail) for prompt in made]
    assert min(lengths) < 16 < 128 < max(lengths) <= 256
    if kind == "shared-prefix":
        assert [prompt.asked_tokens for prompt in made] == [100 + length for length in lengths]
        low, high = 8, 256
        mean = (high + 1 - low) / math.log((high + 1) / low)
        assert WorkloadSpec(tail_tokens=low, most_tail_tokens=high, prefix_tokens=1).prompt_tokens == round(mean + 0.5)


def test_questions_of_a_dataset_are_counted_by_the_tokenizer(tokenizer_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    file.write_text(
        '[{"conversations": [{"from": "human", "value": "words of people"}, {"from": "gpt", "value": "a"}]}]'
    )
    (prompt,) = prompts(tokenizer_file, 1, kind="sharegpt", file=SourceFile(path=str(file), sha256=""))
    assert prompt.asked_tokens == load_tokenizer(str(tokenizer_file)).count("words of people")


def test_a_text_that_cannot_be_cut_to_the_number_is_off_by_one() -> None:
    class Pairs:
        """Tokens in pairs: texts of odd numbers of characters have one more."""

        def __init__(self, text: str) -> None:
            self.offsets = [*pairwise(range(len(text) + 1)), *([(len(text), len(text))] if len(text) % 2 else [])]

    text = TokenCounter(Pairs).cut(lambda length: "x" * length, 1.0, 7)
    assert len(Pairs(text).offsets) in (6, 7, 8)


def test_a_folder_will_do_and_what_is_no_tokenizer_is_refused(tokenizer_file: Path, tmp_path: Path) -> None:
    assert load_tokenizer(str(tokenizer_file.parent)).count("word") > 0
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"give a tokenizer\.json, a folder"):
        RunOptions(url="http://any", tokenizer=str(tmp_path)).check_files()


def test_lengths_are_written_as_a_number_or_as_both_ends() -> None:
    assert RunOptions.model_validate({"url": "http://any", "tail_tokens": 32}).tail_tokens == "32"
    with pytest.raises(ValueError, match="--tail-tokens"):
        RunOptions(url="http://any", tail_tokens="9:3")
