"""What one gateway learns from others: prompts that they sent, engines that lost their cache, and what is in flight."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request import Demand
from gateway.core.routing.engine import OtherLoad
from gateway.core.routing.estimates import CostModel
from gateway.core.routing.kv_reservations import Reservation
from gateway.features.coordination.exchange import LIFE_SECONDS, MOST_PEERS
from gateway.features.coordination.updates import FORMAT, Chains, NamedEngine, SentLoad, Update, encode, hash_of
from tests.unit.coordination.replicas import Channel, Replica

ENGINES = ["http://a", "http://b"]


@pytest.fixture
def channel() -> Channel:
    """Two gateways that know of each other, and number the engines differently."""
    channel = Channel([Replica("one", ENGINES), Replica("two", ENGINES[::-1])])
    channel.run(4.0)
    return channel


def in_flight(replica: Replica, engine: str, prompt_tokens: int = 1000, prefill_seconds: float = 0.4) -> Reservation:
    request = Reservation(Demand("m", prompt_tokens=prompt_tokens, streams=True), 1, prefill_seconds)
    replica.engines[engine].load.start(request, 4.0)
    return request


def test_a_prompt_sent_by_one_gateway_is_a_hit_through_the_other(channel: Channel) -> None:
    one, two = channel.replicas
    one.send("http://a", 1, 2, 3)
    channel.step()
    assert two.holds("http://a", 1, 2, 3)
    assert not two.holds("http://b", 1)


def test_what_was_learned_from_others_is_not_announced_again(channel: Channel) -> None:
    one, two = channel.replicas
    one.send("http://a", 1, 2, 3)
    channel.step()
    assert two.index.changes() == ([], True)


def test_an_engine_that_lost_its_cache_is_forgotten_by_all(channel: Channel) -> None:
    one, two = channel.replicas
    one.send("http://a", 1, 2)
    channel.step()
    two.forget("http://a")
    two.send("http://a", 7)
    channel.step()
    assert not one.holds("http://a", 1)
    assert one.holds("http://a", 7)


def test_what_was_sent_before_others_knew_of_a_lost_cache_is_not_taken_over(channel: Channel) -> None:
    one, two = channel.replicas
    one.send("http://a", 1, 2)
    (message,) = one.exchange.due(channel.now)
    two.forget("http://a")
    two.exchange.receive(message, channel.now)
    channel.step()
    assert one.held() == two.held() == {"http://a": set(), "http://b": set()}


def test_an_answer_that_came_back_in_a_longer_prompt_is_counted_once_by_all(channel: Channel) -> None:
    one, two = channel.replicas
    one.send("http://a", 1, 2)
    one.index.record_answer(one.engines["http://a"].index, 2, 500)
    channel.step()
    assert two.index.answered(2) == 1 << two.engines["http://a"].index
    one.index.supersede_answer(one.engines["http://a"].index, 2)
    channel.step()
    assert two.index.answered(2) == 0
    assert one.held() == two.held()


def test_a_newcomer_gets_what_a_peer_knows(channel: Channel) -> None:
    one, _ = channel.replicas
    for prompt in range(3000):
        one.send("http://a", 5, 10 + prompt)
    channel.run(1.0)
    newcomer = Replica("new", ENGINES)
    channel.replicas.append(newcomer)
    channel.run(2.5)
    assert newcomer.held() == one.held()
    assert newcomer.exchange.counts["snapshots_used"] == 1


def test_a_missed_update_is_noticed_and_made_up_for(channel: Channel) -> None:
    one, two = channel.replicas
    one.send("http://a", 1, 2)
    one.exchange.due(channel.now)  # and nobody hears it
    channel.run(4.0)
    assert two.holds("http://a", 1, 2)
    assert two.exchange.counts["gaps"] == 1


def test_more_changes_than_are_kept_are_made_up_for(channel: Channel) -> None:
    one, two = channel.replicas
    for prompt in range(25_000):
        one.send("http://a", prompt)
    channel.run(5.0)
    assert two.held() == one.held()


def test_what_others_have_in_flight_makes_an_engine_dearer_for_a_while(channel: Channel) -> None:
    one, two = channel.replicas
    engine, model = two.engines["http://a"], CostModel()
    before = engine.terms(model).waits
    in_flight(one, "http://a")
    channel.step()
    assert engine.load.others is not None
    assert (engine.load.others.in_flight, engine.load.others.context_tokens) == (1, 1000)
    assert engine.terms(model).waits > before + 0.3
    assert engine.load.in_flight == 0  # so admission counts own requests only
    channel.replicas.remove(one)
    channel.run(LIFE_SECONDS + 0.1)
    assert engine.load.others is None
    assert engine.load.own_prefill_share(channel.now) == 0.0


def test_loads_of_several_gateways_add_up(channel: Channel) -> None:
    channel.replicas.append(Replica("three", ENGINES))
    channel.run(1.0)
    for replica in channel.replicas[:2]:
        in_flight(replica, "http://b", 500)
    channel.step()
    channel.step()
    others = channel.replicas[2].engines["http://b"].load.others
    assert others is not None
    assert (others.in_flight, others.context_tokens) == (2, 1000)


def test_an_engine_whose_events_are_followed_needs_no_announcement(channel: Channel) -> None:
    one, two = channel.replicas
    one.followed.add(one.engines["http://a"].index)
    one.send("http://a", 1)
    one.send("http://b", 1)
    channel.step()
    assert not two.holds("http://a", 1)
    assert two.holds("http://b", 1)


def test_a_gateway_alone_says_little() -> None:
    alone = Replica("one", ENGINES)
    alone.send("http://a", 1)
    sent = [message for step in range(100) for message in alone.exchange.due(step * 0.05)]
    assert len(sent) == 5  # in five seconds


def test_an_engine_that_another_gateway_does_not_have_is_ignored(channel: Channel) -> None:
    one, two = channel.replicas
    two.engines.pop("http://a")
    two.exchange.follow_fleet()
    one.send("http://a", 1)
    in_flight(one, "http://a")
    channel.step()
    assert two.held() == {"http://b": set()}
    assert two.exchange.counts["used"]


def test_the_number_of_an_engine_that_left_says_nothing_of_its_next_owner(channel: Channel) -> None:
    one, two = channel.replicas
    one.send("http://a", 1)
    engine = one.engines.pop("http://a")
    one.forget("http://b")
    one.exchange.left([engine])
    one.engines["http://c"] = engine
    two.engines["http://c"] = two.engines["http://a"]
    one.exchange.follow_fleet()
    two.exchange.follow_fleet()
    channel.step()
    assert not two.holds("http://c", 1)


def test_messages_that_are_not_as_expected_are_counted_and_change_nothing(channel: Channel) -> None:
    _, two = channel.replicas
    named, good = [NamedEngine(hash_of("http://a"))], Chains(b"\0\0", b"\1\0", b"\0" * 8, b"\1\0\0\0")
    bad = [
        b"",
        b"\xc1",
        b"x" * (1 << 20 | 1),
        msgspec.msgpack.encode([1, FORMAT, "x"]),
        encode(Update("0 big", "x", 1, [], [], Chains())),
        encode(Update(FORMAT, "x", 1, [], [], good)),
        encode(Update(FORMAT, "x", 1, named, [SentLoad(0, 1, 1, 1, float("nan"), 0.0)], Chains())),
        encode(Update(FORMAT, "x", 1, named, [SentLoad(1, 1, 1, 1, 0.0, 0.0)], Chains())),
        encode(Update(FORMAT, "x", 1, named, [], Chains(b"\0\0", b"\2\0", b"\0" * 8, b"\0" * 4))),
        encode(Update(FORMAT, "x", 1, named, [], Chains(b"\0\0", b"\0\0", b"", b""))),
        encode(Update(FORMAT, "x", 1, named, [], Chains(b"\0", b"\1\0", b"\0" * 8, b"\0" * 4))),
        encode(Update(FORMAT, "x", 1, named, [], Chains(b"\0\0", b"\1\0", b"\0" * 8, b"\xff" * 4))),
        encode(Update(FORMAT, "x", 1, named, [], Chains(b"\0\0" * 2000, b"\1\0" * 2000, b"\0" * 16000, b"\0" * 8000))),
    ]
    two.exchange.follow_peers(["one", "x"])
    for data in bad:
        two.exchange.receive(data, channel.now)
    refused = {name: count for name, count in two.exchange.counts.items() if name.startswith("refused_")}
    assert refused == {"refused_malformed": 10, "refused_other_version": 1, "refused_too_long": 2}
    assert two.held() == {"http://a": set(), "http://b": set()}


def test_a_bounded_number_of_gateways_is_known(channel: Channel) -> None:
    _, two = channel.replicas
    names = [f"x{number}" for number in range(2 * MOST_PEERS)]
    assert two.exchange.follow_peers(names) == names[:MOST_PEERS]
    for name in names:
        two.exchange.receive(encode(Update(FORMAT, name, 1, [], [], Chains())), channel.now)
    assert two.exchange.counts["refused_unknown_gateway"] == MOST_PEERS


@given(st.binary(max_size=200), st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_no_message_raises(data: bytes, at: int, noise: bytes) -> None:
    replica = Replica("one", ENGINES)
    replica.exchange.receive(data, 0.0)
    sender = Replica("two", ENGINES)
    sender.send("http://a", 1, 2)
    sender.exchange.receive(encode(Update(FORMAT, "x", 1, [], [], Chains())), 0.0)
    for message in sender.exchange.due(0.0):
        at %= len(message)
        replica.exchange.receive(message[:at] + noise + message[at + len(noise) :], 0.0)


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["send", "send", "send", "forget", "step"]),
        st.sampled_from(ENGINES),
        st.lists(st.integers(0, 1), min_size=1, max_size=5),
    ),
    max_size=60,
)


@given(ACTIONS, st.integers(0, 1 << 30), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.0, 0.3]))
def test_copies_converge_whatever_the_channel_loses_repeats_and_reorders(
    actions: list[tuple[int, str, str, list[int]]], seed: int, loss: float, disorder: float
) -> None:
    channel = Channel([Replica(name, ENGINES) for name in ("one", "two", "three")], Random(seed))
    channel.run(3.0)
    channel.loss, channel.disorder = loss, disorder
    for number, action, engine, path in actions:
        replica = channel.replicas[number]
        if action == "send":
            replica.send(engine, *(int("1" + "".join(map(str, path[: place + 1]))) for place in range(len(path))))
        elif action == "forget":
            replica.forget(engine)
        else:
            channel.step()
    channel.loss = channel.disorder = 0.0
    channel.run(30.0)
    one, two, three = (replica.held() for replica in channel.replicas)
    assert one == two == three


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 400)), max_size=80))
def test_copies_stay_within_the_bounds_of_the_record(sent: list[tuple[int, int, int]]) -> None:
    channel = Channel([Replica(name, ENGINES, 1500) for name in ("one", "two")])
    channel.run(3.0)
    for number, prefix, tail in sent:
        channel.replicas[number].send("http://a", prefix, 1000 + prefix, 10_000 + tail)
        channel.step()
        assert all(replica.index.used_bytes(0) <= 1500 for replica in channel.replicas)


def test_nothing_is_known_of_others_before_they_are_heard() -> None:
    alone = Replica("one", ENGINES)
    alone.exchange.due(0.0)
    assert alone.engines["http://a"].load.others is None
    assert OtherLoad(0, 0, 0, 0.0, 0.0) == (0, 0, 0, 0.0, 0.0)
