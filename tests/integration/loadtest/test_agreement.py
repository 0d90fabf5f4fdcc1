"""The load tester measures what vLLM's own client measures, within 3 %, on a simulated and on a real engine.

`make agreement` runs it: both clients need a machine that is not too busy. Pairs of runs in turns, and medians of their
ratios, leave out what affects both alike; where the rest is too uneven to tell, the test is skipped and says so.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from loadtest.servers.engines import EngineOptions, running_engines
from loadtest.servers.server import simulated_engine
from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, MODELS, print_progress
from tests.integration.loadtest.two_clients import FIGURES, ClosedLoop, Ratios, VllmClient, compared, vllm_client

_PAIRS_SECONDS = 240.0


@pytest.fixture
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VllmClient]:
    if engine_kind(request.config) != "vllm":
        pytest.skip("vLLM's own client is needed: run `make agreement`")
    with vllm_client(MODELS / CHAT_MODEL, tmp_path) as running:
        yield running


def check(ratios: Ratios, where: str) -> None:
    print_progress(f"{where}, the load tester's figures to those of vLLM's client: {ratios}")
    assert not ratios.certainly_beyond(), str(ratios)
    if ratios.not_within():
        pytest.skip(f"this machine is too busy to tell: {ratios}")


@pytest.mark.agreement
def test_both_clients_agree_on_a_simulated_engine(client: VllmClient, tmp_path: Path) -> None:
    """Its steps are four times as long as those of an H100, so that the clients' own time is a small part."""
    flags = ["--model", CHAT_MODEL, "--time-scale", "4"]
    with simulated_engine(flags, tmp_path / "sim.log") as engine:
        load = ClosedLoop(engine.url, CHAT_MODEL, users=16, requests=161, prompt_tokens=256, output_tokens=16)
        check(compared(load, client, time.monotonic() + _PAIRS_SECONDS), "simulated engine")


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started in the block runs on these cores alone; on all, if there are none."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or every)
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


@pytest.mark.agreement
def test_both_clients_agree_on_a_real_engine(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The clients have a core that the engine does not use."""
    core, *others = os.sched_getaffinity(0)
    with ExitStack() as stack:
        with on_cores(set(others)):
            if engine_kind(request.config) == "vllm":
                [url] = stack.enter_context(running_engines(EngineOptions(count=1), tmp_path / "engine")).urls
        stack.enter_context(on_cores({core}))
        client: VllmClient = request.getfixturevalue("client")
        load = ClosedLoop(url, CHAT_MODEL, users=4, requests=121, prompt_tokens=256, output_tokens=16)
        check(compared(load, client, time.monotonic() + _PAIRS_SECONDS), "real engine")


def _ratios(*of_each: float) -> Ratios:
    return Ratios({name: list(of_each) for name in FIGURES})


def test_a_difference_is_certain_only_where_chance_does_not_explain_it() -> None:
    even, noisy, apart = _ratios(*[1.0, 1.01] * 3), _ratios(0.7, 1.2, 1.4, 0.9, 1.3), _ratios(1.09, 1.1, 1.1, 1.12, 1.1)
    assert (even.not_within(), even.are_known()) == ([], True)
    assert (noisy.certainly_beyond(), noisy.are_known()) == ([], False)
    assert apart.certainly_beyond() == noisy.not_within() == list(FIGURES)
    assert _ratios(1.0, 1.0).not_within() == list(FIGURES)  # too few
