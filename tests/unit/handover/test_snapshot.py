"""What one gateway knows, written down and taken over by the next one."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import Gateway
from gateway.config.file import parse
from gateway.core.backends.facts import Facts, KvEventSource, ModelCard
from gateway.core.backends.settings import BackendConfig
from gateway.core.request import Demand, Usage
from gateway.features.handover.snapshot import FILE_NAME, FORMAT, SnapshotError, load, read, save, write
from gateway.features.responses.stored import Place

A, B = "http://a:1", "http://b:1"
KEYS = [
    {"name": "alice", "key": "sk-1", "requests_per_minute": 60, "tokens_per_minute": 600, "tokens_per_month": 900},
    {"name": "bob", "key": "sk-2", "max_concurrent_requests": 3},
]


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def gateway(*urls: str) -> Gateway:
    document = {"backends": [{"url": url} for url in urls or (A, B)], "auth": {"keys": KEYS}}
    made = Gateway(parse(document), None, clock=Clock(), unix_seconds=lambda: 1000.0)
    return made


def no_pause() -> None:
    """The event loop does not run meanwhile."""


def facts(start_seconds: float | None = 5.0) -> Facts:
    cards = (
        ModelCard("m", "/models/m", None, max_model_len=4096, raw={"id": "m", "permission": [{"x": 1}]}),
        ModelCard("lora", None, "m"),
    )
    source = KvEventSource(0, "zmq", "tcp://*:5557", replay_endpoint=None, topic="")
    return Facts(
        "0.32",
        cards,
        block_size_tokens=16,
        kv_cache_tokens=10_000,
        prefix_caching=True,
        max_num_seqs=8,
        engines=1,
        kv_event_sources=(source,),
        process_start_seconds=start_seconds,
        can_admin=True,
    )


def demand(keys: tuple[int, ...], tenant: str = "t") -> Demand:
    edges = tuple(200 * (at + 1) for at in range(len(keys)))
    size = edges[-1] if edges else 0
    return Demand("m", keys=keys, edges=edges, prompt_size=size, prompt_tokens=size // 4, tenant=tenant, weight=2.0)


def experienced(*prompts: tuple[int, ...]) -> Gateway:
    """A gateway that has served these prompts."""
    made = gateway()
    for backend in made.core.fleet.backends:
        made.core.fleet.learned(backend, facts())
    for number, keys in enumerate(prompts):
        asked, engine = demand(keys, f"t{number % 3}"), made.core.fleet.engines()[number % 2]
        made.core.cache_state.index.record(engine.index, asked.keys, asked.edges)
        made.core.cache_state.estimates.learn("m", 4000, 1000 + number, 30)
        made.core.cache_state.estimates.remember(keys[-1], 1000, 30)
        made.core.cache_state.output_lengths.answered(asked, Usage(1000, 30 + number))
        made.core.cache_state.hit_accuracy.observed(engine.index, 1000, 300)
        made.core.calibrations.learning("m").first_token(1000, 0.1, 0.2)
        engine.on_pace(0.7)
        tenants = made.core.queue.tenants.of("m")
        tenants.bound(tenants.arrived(asked, 100.0), asked, 1, 500.0, at_once=True)
        made.knowledge.stored.restore([(f"resp_{number}", Place("a:1", "m", ("alice", f"t{number}")))])
    made.knowledge.limits.by_name["alice"].charge(50)
    made.core.fleet.backends[0].limiter.start_from(6, 8)
    return made


def changed_by_hand(made: Gateway) -> Gateway:
    made.core.membership.add(BackendConfig(url="http://c:1", name="c", api_key="sk-c"))
    made.core.membership.remove("b:1")
    made.core.membership.drain("a:1")
    return made


def passed_on(sections: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    write(sections, file, no_pause)
    file.seek(0)
    return read(file)


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6, unique=True).map(tuple), max_size=8))
async def test_the_next_gateway_knows_what_the_former_one_knew(prompts: list[tuple[int, ...]]) -> None:
    before = passed_on(await changed_by_hand(experienced(*prompts)).knowledge.take())
    new = gateway()
    new.knowledge.restore(before, same_engines=True)
    after = passed_on(await new.knowledge.take())
    assert after.keys() == before.keys()
    for name in before.keys() - {"secret"}:
        assert after[name] == before[name], name


async def test_hits_are_predicted_as_before() -> None:
    old = experienced((1, 2, 3, 4), (5, 6), (1, 2, 9))
    new = gateway()
    new.knowledge.restore(passed_on(await old.knowledge.take()), same_engines=True)
    for keys in ((1, 2, 3, 4), (1, 2, 9), (5,), (7,)):
        assert new.core.cache_state.index.depths(keys)[:2] == old.core.cache_state.index.depths(keys)[:2]


async def test_changes_by_hand_and_rate_limits_go_on() -> None:
    new = gateway()
    new.knowledge.restore(passed_on(await changed_by_hand(experienced()).knowledge.take()), same_engines=True)
    assert {name: backend.draining for name, backend in new.core.fleet.by_name.items()} == {"a:1": "by hand", "c": ""}
    assert new.core.fleet.by_name["c"].config.api_key == "sk-c"
    assert new.core.membership.removed == ["b:1"]
    assert new.knowledge.limits.accounts() == {"alice": {"requests": 1.0, "tokens": 50.0}, "bob": {}}
    assert new.knowledge.limits.spent() == {"alice": {"month": [0, 50]}}


async def test_budgets_of_a_month_that_is_over_are_renewed_and_an_earlier_version_has_none() -> None:
    sections = passed_on(await experienced().knowledge.take())
    new = gateway()
    sections["spent"] = {"alice": {"month": [31, 50], "day": [0, 50]}, "carol": {"day": [0, 50]}}
    new.knowledge.restore(sections, same_engines=True)
    assert new.knowledge.limits.spent() == {"alice": {"month": [0, 0]}}
    del sections["spent"]
    gateway().knowledge.restore(sections, same_engines=True)


async def test_what_keys_used_after_the_snapshot_is_passed_on() -> None:
    old, new = experienced(), gateway()
    sections, moment = passed_on(await old.knowledge.take()), old.knowledge.use()
    new.knowledge.restore(sections, same_engines=True)
    alice = old.knowledge.limits.by_name["alice"]
    alice.charge(100)
    alice.correct(50, 20, counts=True)  # the request of before the snapshot
    new.knowledge.restore_use(passed_on({"use": old.knowledge.use_since(moment), "records": {}})["use"])
    assert new.knowledge.limits.spent() == old.knowledge.limits.spent() == {"alice": {"month": [0, 120]}}
    assert old.knowledge.use_since(old.knowledge.use())["spent"] == {"alice": {"month": [0, 0]}}
    whole = gateway()
    whole.knowledge.restore_use(old.knowledge.use_since({}))
    assert whole.knowledge.limits.spent() == old.knowledge.limits.spent()


async def test_what_keys_used_long_ago_is_forgotten() -> None:
    sections, new = passed_on(await experienced().knowledge.take()), gateway()
    new.knowledge.__dict__["unix_seconds"] = lambda: 1003.0
    new.knowledge.restore(sections, same_engines=False)
    assert new.knowledge.limits.accounts()["alice"] == {"requests": 0.0, "tokens": 20.0}


async def test_a_cache_that_may_have_been_lost_meanwhile_is_not_taken_over() -> None:
    old = experienced((1, 2), (3, 4))
    old.core.fleet.learned(old.core.fleet.backends[0], facts(start_seconds=None))
    sections = passed_on(await old.knowledge.take())
    warm, cold = gateway(), gateway()
    warm.knowledge.restore(sections, same_engines=True)
    cold.knowledge.restore(sections, same_engines=False)
    assert warm.core.cache_state.index.depths((1, 2))[0] == 2
    assert cold.core.cache_state.index.depths((1, 2))[0] == 0


async def test_another_process_at_the_address_of_an_engine_voids_its_record() -> None:
    new = gateway()
    new.knowledge.restore(passed_on(await experienced((1, 2), (3, 4)).knowledge.take()), same_engines=False)
    assert new.core.cache_state.index.depths((1, 2))[0] == 2
    new.core.fleet.learned(new.core.fleet.backends[0], facts(start_seconds=6.0))
    assert new.core.cache_state.index.depths((1, 2))[0] == 0


async def test_backends_that_are_configured_no_more_are_left_out() -> None:
    new = gateway("http://d:1")
    new.knowledge.restore(passed_on(await changed_by_hand(experienced((1, 2))).knowledge.take()), same_engines=True)
    assert sorted(new.core.fleet.by_name) == ["c", "d:1"]


async def test_a_snapshot_on_disk_is_private_and_replaced_as_a_whole(tmp_path: Path) -> None:
    sections = await experienced((1, 2)).knowledge.take()
    folder = tmp_path / "new" / "state"
    assert load(folder) is None
    save(sections, folder, no_pause)
    save(sections, folder, no_pause)
    assert [file.name for file in folder.iterdir()] == [FILE_NAME]
    assert (folder / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    loaded = load(folder)
    assert loaded is not None
    assert loaded["unix_seconds"] == 1000.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.replace(f"snapshot {FORMAT}".encode(), b"snapshot 999", 1), "another version"),
        (lambda _: b"", "not a snapshot"),
        (lambda _: b"x" * 5000, "not a snapshot"),
        (lambda data: data[:-3], "incomplete"),
        (lambda data: data + b"\x00", "incomplete"),
        (lambda data: data[:40] + b"\xc1" * 60 + data[100:], "cannot be read|incomplete"),
    ],
)
async def test_a_snapshot_that_cannot_be_used_says_why(change: Any, reason: str, tmp_path: Path) -> None:
    save(await experienced((1, 2)).knowledge.take(), tmp_path, no_pause)
    file = tmp_path / FILE_NAME
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(SnapshotError, match=reason):
        load(tmp_path)
