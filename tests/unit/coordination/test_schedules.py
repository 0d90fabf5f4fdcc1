"""Random schedules of faults in virtual time: no cap is exceeded, and the blocks of an ended replica are used again.

COORDINATION_SCHEDULES changes how many are tried.
"""

import os
from random import Random

import pytest

from gateway.core.routing.engine import EngineUse
from tests.unit.coordination.world import World

SCHEDULES = int(os.environ.get("COORDINATION_SCHEDULES", "150"))
CAPS = EngineUse(8, 20_000), EngineUse(3, 1000)
FAULTS = ("kill", "pause", "cut", "loses", "restart", "outage", "flush", "join")


def strike(world: World, fault: str, random: Random) -> None:
    """One fault, and its end after a while."""
    alive = [each for each in world.replicas if each.is_alive]
    seconds = random.choice((0.3, 2.0, 5.0, 20.0, 60.0)) * random.uniform(0.5, 1.0)
    server = world.server
    if fault == "join" and len(alive) < 5:
        world.join(random.choice((0.2, 3.0, 20.0)))
    elif fault == "kill" and len(alive) > 1:
        random.choice(alive).kill()
    elif fault == "restart":  # empty, or after a failover
        world.table_lost()
        server.start()
    elif fault == "outage":
        world.table_lost()
        server.is_up = False
        world.at(seconds, server.start)
    elif fault == "flush":  # by hand, or by a clock that steps past the end of the table's life
        world.table_lost()
        server.flush()
    elif alive:
        member = random.choice(alive)
        world.struck(member)
        if fault == "pause":
            member.is_paused = True
            world.at(seconds, member.resume)
        elif fault in ("cut", "loses"):
            setattr(member, "is_cut" if fault == "cut" else "loses", True)

            def over() -> None:
                member.is_cut = member.loses = False

            world.at(seconds, over)


# Schedule 610: a table that is lost with a change which was proposed, and not applied. Schedule 840: a cap is exceeded
# in the one case in which it may be, before the last fault.
FOUND = (610, 840)


@pytest.mark.parametrize("part", range(10))
def test_no_schedule_of_faults_exceeds_a_cap(part: int) -> None:
    for seed in [*range(part, SCHEDULES, 10), *FOUND[part::10]]:
        random = Random(seed)
        world = World(seed, CAPS)
        for _ in range(random.randint(2, 4)):
            world.join(random.choice((0.2, 3.0, 20.0)))
        until = 0.0
        try:
            for _ in range(random.randint(1, 8)):
                until += random.choice((0.1, 1.0, 5.0, 10.0)) * random.random()
                world.run(until)
                strike(world, random.choice(FAULTS), random)
            world.run(until + 20)
        except AssertionError as error:
            if "forgotten" in str(error):
                continue
            raise AssertionError(f"schedule {seed}: {error}") from error


@pytest.mark.parametrize("seed", range(20))
def test_the_blocks_of_a_replica_that_ended_are_used_again_within_five_seconds(seed: int) -> None:
    world = World(seed, CAPS)
    members = [world.join(20.0) for _ in range(2 + seed % 3)]
    world.run(10 + seed / 7)
    gone = members[0]
    assert gone.name in world.server.shared.records
    gone.kill()
    world.run(world.now + 5)
    assert gone.name not in world.server.shared.records
    free = [8, 3]
    for member in members[1:]:
        for at in range(2):
            free[at] -= member.blocks.limit(f"e{at}", CAPS[at], member.clock()).slots
    world.run(world.now + 25)
    assert max(free) <= 1
    assert world.peaks[0].slots == 8


def test_a_replica_that_is_cut_off_keeps_an_even_part_and_the_others_keep_it_free() -> None:
    world = World(1, CAPS)
    one, other = world.join(20.0), world.join(20.0)
    world.run(10)
    one.is_cut = True
    world.run(20)
    assert one.blocks.is_failing
    assert 0 < one.blocks.limit("e0", CAPS[0], one.clock()).slots <= 4
    assert other.blocks.missing == 1
    assert (
        other.blocks.limit("e0", CAPS[0], other.clock()).slots <= 8 - one.blocks.limit("e0", CAPS[0], one.clock()).slots
    )
    one.is_cut = False
    world.run(23)
    assert (one.blocks.live, other.blocks.live, other.blocks.missing) == (2, 2, 0)


def test_without_a_store_all_go_on_with_even_parts() -> None:
    world = World(2, CAPS)
    members = [world.join(20.0) for _ in range(3)]
    world.run(10)
    world.server.is_up = False
    served = world.served
    world.run(70)
    assert world.served > served + 50
    assert all(member.blocks.limit("e0", CAPS[0], member.clock()).slots in (1, 2, 3) for member in members)
    world.server.start()
    world.run(76)
    assert all(member.blocks.is_current(member.clock()) for member in members)


def test_a_replica_that_was_paused_admits_nothing_before_it_has_renewed() -> None:
    world = World(3, CAPS)
    one = world.join(20.0)
    world.join(20.0)
    world.run(10)
    assert one.blocks.limit("e0", CAPS[0], one.clock()) != (0, 0)
    one.is_paused = True
    world.run(70)
    assert one.blocks.limit("e0", CAPS[0], one.clock()) == (0, 0)


def test_a_quiet_replica_gets_a_slot_for_its_first_request() -> None:
    world = World(4, CAPS)
    busy, idle = world.join(20.0), world.join(0.001)
    world.run(10)
    assert busy.blocks.limit("e0", CAPS[0], busy.clock()).slots >= 5
    idle.waiting[0].append((EngineUse(1, 100), idle.clock()))
    idle.call_soon()
    world.run(70)
    assert not idle.waiting[0]
