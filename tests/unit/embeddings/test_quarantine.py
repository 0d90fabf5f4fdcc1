"""Clients that spoiled a batch are quarantined for a while."""

from gateway.features.embeddings.kinds import Quarantine, network_of


def test_it_lasts_for_a_while_and_begins_anew_with_each_time() -> None:
    quarantine = Quarantine()
    quarantine.add("ann", 100.0)
    assert quarantine.has("ann", 109.9)
    assert not quarantine.has("bob", 101.0)
    quarantine.add("ann", 105.0)
    assert quarantine.has("ann", 114.9)
    assert not quarantine.has("ann", 115.1)


def test_no_more_are_remembered_than_memory_is_given() -> None:
    quarantine = Quarantine()
    for number in range(5000):
        quarantine.add(str(number), 100.0)
    assert len(quarantine._until) == 1024
    assert quarantine.has("4999", 101.0)


def test_without_a_name_an_address_or_a_network_stands_for_a_client() -> None:
    assert network_of("192.0.2.7") == network_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8:0:1::1") == network_of("2001:db8::1:ffff:0:0:2")
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8:0:2::1")
    assert network_of("") == ""
