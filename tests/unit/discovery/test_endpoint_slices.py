"""Which backends EndpointSlices list, and that the order of events makes no difference."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.discovery.kubernetes import NOT_READY, SlicesExpired, SliceTable, listed_backends, status_message
from gateway.features.discovery.listings import DiscoveryError, Listing
from gateway.features.discovery.settings import KubernetesDiscovery
from tests.kubernetes_api import Document, endpoint_slice, event, pod, status


def table_of(*slices: Document) -> SliceTable:
    table = SliceTable()
    table.replace(json.dumps({"metadata": {"resourceVersion": "1"}, "items": slices}).encode())
    return table


def read(table: SliceTable, **config: Any) -> Listing:
    return listed_backends(table.slices, KubernetesDiscovery(service="vllm", **config), {"max_in_flight": 7})


def shown(listing: Listing) -> dict[str, tuple[str, str]]:
    return {each.config.name: (each.config.url, each.draining) for each in listing.backends}


def test_every_pod_of_every_slice_is_a_backend_with_the_settings_and_its_zone() -> None:
    slices = (
        endpoint_slice("vllm-1", pod("a", "10.0.0.1"), pod("b", "10.0.0.2", zone=None)),
        endpoint_slice("vllm-2", pod("c", "10.0.0.3", ready=None), ports=[("http", 9000)]),
    )
    listing = read(table_of(*slices))
    assert shown(listing) == {
        "a": ("http://10.0.0.1:8000", ""), "b": ("http://10.0.0.2:8000", ""), "c": ("http://10.0.0.3:9000", ""),
    }  # fmt: skip
    assert [each.zone for each in listing.backends] == ["zone-a", "", "zone-a"]
    assert {each.config.max_in_flight for each in listing.backends} == {7}
    assert listing.problem == ""


def test_a_pod_that_is_not_ready_drains_and_one_that_terminates_is_not_listed() -> None:
    endpoints = (
        pod("starts", "10.0.0.1", ready=False),
        pod("ends", "10.0.0.2", ready=False, terminating=True),
        pod("published", "10.0.0.3", ready=True, terminating=True),  # by publishNotReadyAddresses
    )
    assert shown(read(table_of(endpoint_slice("vllm-1", *endpoints)))) == {
        "starts": ("http://10.0.0.1:8000", NOT_READY)
    }


def test_a_pod_with_two_addresses_is_one_backend() -> None:
    slices = (
        endpoint_slice("vllm-6", pod("a", "fd00::1"), pod("b", "fd00::2"), family="IPv6"),
        endpoint_slice("vllm-4", pod("a", "10.0.0.1"), pod("b", "10.0.0.2", ready=False), family="IPv4"),
    )
    assert shown(read(table_of(*slices))) == {"a": ("http://10.0.0.1:8000", ""), "b": ("http://[fd00::2]:8000", "")}


def test_a_pod_that_moves_between_slices_is_one_backend_until_one_says_that_it_terminates() -> None:
    moving = endpoint_slice("vllm-1", pod("a", "10.0.0.1")), endpoint_slice("vllm-2", pod("a", "10.0.0.1", ready=False))
    assert shown(read(table_of(*moving))) == {"a": ("http://10.0.0.1:8000", "")}
    ending = endpoint_slice("vllm-3", pod("a", "10.0.0.1", ready=False, terminating=True))
    assert shown(read(table_of(*moving, ending))) == {}


def test_a_pod_that_takes_the_place_of_one_that_ends_is_another_backend() -> None:
    old = pod("vllm-0", "10.0.0.1", uid="1", ready=False, terminating=True)
    same_name = endpoint_slice("vllm-1", old, pod("vllm-0", "10.0.0.9", uid="2"))
    assert shown(read(table_of(same_name))) == {"vllm-0": ("http://10.0.0.9:8000", "")}
    same_address = endpoint_slice("vllm-1", old, pod("vllm-x7k", "10.0.0.1", uid="3"))
    assert shown(read(table_of(same_address))) == {"vllm-x7k": ("http://10.0.0.1:8000", "")}
    both = endpoint_slice("vllm-1", pod("a", "10.0.0.1", ready=False), pod("b", "10.0.0.1"))
    assert shown(read(table_of(both))) == {"b": ("http://10.0.0.1:8000", "")}  # two caps for one server would be wrong


def test_an_endpoint_without_a_pod_is_named_by_its_address() -> None:
    alone = {"addresses": ["10.0.0.1"]}
    named = pod("x" * 200, "engine.example")
    slices = endpoint_slice("own", alone), endpoint_slice("fqdn", named, family="FQDN")
    assert shown(read(table_of(*slices), tls=True)) == {
        "10.0.0.1:8000": ("https://10.0.0.1:8000", ""), "engine.example:8000": ("https://engine.example:8000", ""),
    }  # fmt: skip


@pytest.mark.parametrize(("port", "expected"), [("http", 8000), ("metrics", 9090), (7000, 7000), (None, None)])
def test_the_port_is_the_configured_one_or_the_only_one(port: Any, expected: int | None) -> None:
    listing = read(table_of(endpoint_slice("vllm-1", pod("a"), ports=[("http", 8000), ("metrics", 9090)])), port=port)
    if expected is None:
        assert shown(listing) == {}
        assert listing.problem == (
            "EndpointSlice vllm-1 does not have exactly one port: set port; ports: http 8000, metrics 9090"
        )
    else:
        assert shown(listing) == {"a": (f"http://127.0.0.1:{expected}", "")}


def test_what_is_missing_is_said_with_what_there_is() -> None:
    assert read(table_of()).problem == "no EndpointSlice of vllm: check the name and the namespace"
    assert read(table_of(endpoint_slice("vllm-1", ports=[]))).problem == ""  # a Service without pods
    table = table_of(endpoint_slice("vllm-1", pod("a")), endpoint_slice("vllm-2", pod("b", zone="zone-b")))
    assert read(table, port="grpc").problem.startswith("EndpointSlice vllm-1 has no port named grpc; ports: http 8000")
    assert read(table, zone="zone-x").problem == "no endpoint is in zone zone-x; zones: zone-a, zone-b"
    assert list(shown(read(table, zone="zone-b"))) == ["b"]
    many = [endpoint_slice(f"vllm-{number}", pod("a"), ports=[]) for number in range(5)]
    assert read(table_of(*many)).problem.endswith("; 2 more")
    wrong = endpoint_slice("vllm-1", pod("a", "no address"), pod("b"))
    listing = read(table_of(wrong))
    assert (list(shown(listing)), listing.problem) == (["b"], "a has an address that cannot be used: no address")


def test_events_change_the_list_and_bookmarks_only_the_version() -> None:
    table = table_of()
    added = endpoint_slice("vllm-1", pod("a"))
    added["metadata"]["resourceVersion"] = "5"
    table.update(event("ADDED", added))
    assert (list(shown(read(table))), table.version) == (["a"], "5")
    table.update(event("BOOKMARK", {"metadata": {"resourceVersion": "9"}, "endpoints": None, "addressType": ""}))
    assert (list(shown(read(table))), table.version) == (["a"], "9")
    table.update(event("DELETED", added))
    table.update(event("DELETED", added))
    assert shown(read(table)) == {}


def test_an_error_event_says_whether_to_list_again() -> None:
    table = table_of()
    with pytest.raises(DiscoveryError, match="the watch failed: 500 etcd is down"):
        table.update(event("ERROR", status(500, "InternalError", "etcd is down")))
    assert table.version == "1"
    with pytest.raises(SlicesExpired):
        table.update(event("ERROR", status(410, "Expired", "too old resource version")))


@pytest.mark.parametrize("line", [b"", b"{}", b"<html>", b'{"type": "ADDED", "object": {"metadata": 1}}'])
def test_what_is_no_event_is_an_error(line: bytes) -> None:
    with pytest.raises(DiscoveryError, match="the API server sent something else than expected"):
        table_of().update(line)
    assert status_message(line) == ""


ENDPOINTS = st.lists(
    st.builds(
        pod,
        st.sampled_from("abc"),
        st.sampled_from(("10.0.0.1", "10.0.0.2", "10.0.0.3")),
        ready=st.sampled_from((True, False, None)),
        terminating=st.booleans(),
        zone=st.sampled_from(("zone-a", "zone-b", None)),
        uid=st.sampled_from("123"),
    ),
    max_size=4,
)
SLICES = st.builds(
    lambda name, endpoints, family, port: endpoint_slice(name, *endpoints, family=family, ports=[("http", port)]),
    st.sampled_from(("vllm-1", "vllm-2", "vllm-3")),
    ENDPOINTS,
    st.sampled_from(("IPv4", "IPv6")),
    st.sampled_from((8000, 9000)),
)


@given(
    first=st.lists(SLICES, max_size=3, unique_by=lambda each: each["metadata"]["name"]),
    changes=st.lists(st.tuples(st.booleans(), SLICES), max_size=12),
    random=st.randoms(use_true_random=False),
    zone=st.sampled_from(("", "zone-a")),
)
def test_any_order_of_events_leads_to_what_a_list_from_scratch_says(
    first: Sequence[Document], changes: Sequence[tuple[bool, Document]], random: Any, zone: str
) -> None:
    watched = table_of(*first)
    now = {each["metadata"]["name"]: each for each in first}
    for deletes, document in changes:
        name = document["metadata"]["name"]
        watched.update(event("DELETED" if deletes else "MODIFIED" if name in now else "ADDED", document))
        if deletes:
            now.pop(name, None)
        else:
            now[name] = document
    shuffled = random.sample(list(now.values()), len(now))
    for document in shuffled:
        random.shuffle(document["endpoints"] or [])
    listing = read(watched, zone=zone)
    assert listing == read(table_of(*shuffled), zone=zone)
    names = [each.config.name for each in listing.backends]
    urls = [each.config.url for each in listing.backends]
    assert (len(set(names)), len(set(urls))) == (len(names), len(urls))
    listed = [endpoint for document in now.values() for endpoint in document["endpoints"] or []]
    ending = {each["targetRef"]["uid"] for each in listed if each["conditions"]["terminating"]}
    assert all(
        any(each["targetRef"]["name"] == name and each["targetRef"]["uid"] not in ending for each in listed)
        for name in names
    )
