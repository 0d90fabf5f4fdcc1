"""How proxies behave while one engine is away: every proxy under every fault, in turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from gateway.cli.demo import free_ports
from loadtest.compare.killed_figures import figures
from loadtest.compare.killed_load import KilledLoad
from loadtest.compare.killed_run import observe
from loadtest.compare.killed_schema import Fault, Killed, KilledTurn
from loadtest.compare.peer import Peer, Setting
from loadtest.compare.proxy import ProxyFailed, started
from loadtest.servers.engines import Engines
from loadtest.servers.serving import NotServing
from loadtest.vllm_cpu.process import VllmFailed
from loadtest.workloads.body import Endpoint


@dataclass(frozen=True)
class KilledCourse:
    """What every proxy is put through."""

    engines: Engines
    load: KilledLoad
    endpoint: Endpoint
    peers_dir: Path
    out: Path
    console: Console


def carry_out(course: KilledCourse, peers: Sequence[Peer], repetitions: int, seed: int) -> Killed:
    """All turns, in another order in each repetition. Whatever is finished when the user stops it is reported."""
    rng = random.Random(f"killed-{seed}")
    turns: list[KilledTurn] = []
    for repetition in range(repetitions):
        every = list(product(peers, Fault))
        for peer, fault in rng.sample(every, len(every)):
            try:
                turn = _turn(course, peer, fault, repetition, seed)
            except KeyboardInterrupt:
                return _of(course, turns)
            turns.append(turn)
            _tell(course.console, turn, repetitions)
    return _of(course, turns)


def _of(course: KilledCourse, turns: list[KilledTurn]) -> Killed:
    return Killed(load=course.load.told(), patience_seconds=course.load.patience_seconds, turns=turns)


def _turn(course: KilledCourse, peer: Peer, fault: Fault, repetition: int, seed: int) -> KilledTurn:
    engines, load = course.engines, course.load
    turn = KilledTurn(arm=peer.name, fault=fault, repetition=repetition)
    folder = course.out / "proxies" / f"{peer.name}-{fault}"
    folder.mkdir(parents=True, exist_ok=True)
    port, metrics_port = free_ports(2)
    options = engines.options
    setting = Setting(tuple(engines.urls), port, metrics_port, folder, options.model, options.max_num_seqs)
    engine = repetition % len(engines.processes)
    plan = load.plan(setting.url, course.endpoint, options.model, seed + repetition)
    try:
        with started(peer, course.peers_dir, setting, folder / "log.err", course.endpoint) as proxy:
            found = observe(engines, load.outage(engine, fault), plan)
            proxy.check()
    except ProxyFailed as error:
        return turn.model_copy(update={"failure": str(error), "log": error.log})
    except (NotServing, VllmFailed, TimeoutError, OSError) as error:
        return turn.model_copy(update={"failure": str(error)})
    return turn.model_copy(update={"figures": figures(found.records, found.moments, found.seen, engine)})


def _tell(console: Console, turn: KilledTurn, repetitions: int) -> None:
    told = turn.failure
    if turn.figures is not None:
        told = f"{turn.figures.lost} of {turn.figures.requests} requests lost"
    text = f"{turn.arm}, {turn.fault}, repetition {turn.repetition + 1} of {repetitions}: {told}"
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
