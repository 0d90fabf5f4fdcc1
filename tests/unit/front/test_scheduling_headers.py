import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.front.http_request import HttpRequest, SchedulingHeaders
from gateway.core.request import Demand
from gateway.features.keys.settings import KeyConfig
from tests.unit.front.wires import Sent

TEAM = KeyConfig(name="team", key="k", weight=4.0)
NIGHT = KeyConfig(name="night", key="n", priority="batch")
ARRIVED = 90.0


def sent(headers: dict[bytes, bytes], key: KeyConfig | None = None) -> HttpRequest:
    made = Sent(headers=headers).incoming()
    made.key = key
    return made


def ask_for(headers: dict[bytes, bytes] | None = None, key: KeyConfig | None = None, tenant_header: str = "") -> Demand:
    tenant, weight, batch, deadline = SchedulingHeaders(tenant_header).read(sent(headers or {}, key), streams=False)
    return Demand("m", tenant=tenant, weight=weight, batch=batch, deadline_seconds=deadline)


def test_without_a_key_and_headers_all_requests_are_one_interactive_tenant() -> None:
    ask = ask_for()
    assert (ask.tenant, ask.weight, ask.batch, ask.deadline_seconds) == ("", 1.0, False, None)


def test_a_key_is_a_tenant_with_its_weight_and_class() -> None:
    assert (ask_for(key=TEAM).tenant, ask_for(key=TEAM).weight, ask_for(key=TEAM).batch) == ("team", 4.0, False)
    assert ask_for(key=NIGHT).batch


def test_a_configured_header_names_the_tenant_and_the_key_still_gives_the_weight() -> None:
    ask = ask_for({b"x-user": b" ann b "}, TEAM, tenant_header="X-User")
    assert (ask.tenant, ask.weight) == ("ann b", 4.0)


@pytest.mark.parametrize("headers", [{}, {b"x-user": b""}, {b"x-user": b"  "}])
def test_where_the_header_is_missing_or_empty_the_key_is_the_tenant(headers: dict[bytes, bytes]) -> None:
    assert ask_for(headers, TEAM, tenant_header="x-user").tenant == "team"


def test_a_header_that_is_not_configured_names_no_tenant() -> None:
    assert ask_for({b"x-user": b"ann"}, TEAM).tenant == "team"


@pytest.mark.parametrize("name", [b"x" * 129, b"a\x00b", b"a\nb", "ä".encode(), b"\xff"])
def test_a_name_that_is_long_or_not_plain_text_is_replaced_by_its_hash(name: bytes) -> None:
    value = ask_for({b"x-user": name}, tenant_header="x-user").tenant
    assert value.startswith("sha256-")
    assert len(value) == 23
    assert value != ask_for({b"x-user": name + b"!"}, tenant_header="x-user").tenant


def test_a_name_of_128_characters_is_kept() -> None:
    assert ask_for({b"x-user": b"x" * 128}, tenant_header="x-user").tenant == "x" * 128


@pytest.mark.parametrize(
    ("key", "value", "batch"),
    [
        (None, b"batch", True),
        (None, b"Interactive", False),
        (TEAM, b" BATCH ", True),
        (TEAM, b"interactive", False),
        (NIGHT, b"batch", True),
        (NIGHT, b"interactive", True),  # no request rises above its key
    ],
)
def test_a_request_may_lower_its_class_and_not_raise_it(key: KeyConfig | None, value: bytes, batch: bool) -> None:
    assert ask_for({b"x-gateway-priority": value}, key).batch is batch


@pytest.mark.parametrize("value", [b"", b"high", b"batch,interactive", b"1"])
def test_a_class_that_does_not_exist_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="interactive or batch"):
        ask_for({b"x-gateway-priority": value})


@pytest.mark.parametrize(("value", "seconds"), [(b"1500", 1.5), (b"0.5", 0.0005), (b" 250 ", 0.25)])
def test_a_deadline_counts_from_the_requests_arrival(value: bytes, seconds: float) -> None:
    assert ask_for({b"x-gateway-deadline-ms": value}).deadline_seconds == pytest.approx(ARRIVED + seconds)


@pytest.mark.parametrize("value", [b"", b"0", b"0.0", b"-1", b"1e3", b"inf", b"nan", b"1_0", b"soon", b"1" * 13])
def test_a_deadline_that_is_no_positive_number_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="positive number of milliseconds"):
        ask_for({b"x-gateway-deadline-ms": value})


@pytest.mark.parametrize("name", [b"x-stainless-read-timeout", b"x-stainless-timeout"])
@pytest.mark.parametrize(("value", "seconds"), [(b"600", 600.0), (b"12.5", 12.5)])
def test_the_time_out_of_an_sdk_is_a_deadline(name: bytes, value: bytes, seconds: float) -> None:
    assert ask_for({name: value}).deadline_seconds == ARRIVED + seconds


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"None", b"inf", b"nan", b"NOT_GIVEN"])
def test_a_time_out_of_an_sdk_that_is_no_positive_number_says_nothing(value: bytes) -> None:
    assert ask_for({b"x-stainless-read-timeout": value}).deadline_seconds is None


def test_the_gateways_own_deadline_goes_before_the_sdks() -> None:
    ask = ask_for({b"x-gateway-deadline-ms": b"1000", b"x-stainless-read-timeout": b"600"})
    assert ask.deadline_seconds == ARRIVED + 1.0


def test_the_sdk_of_a_stream_that_gets_comments_in_time_is_patient() -> None:
    def deadline(value: bytes, *, streams: bool, comment_seconds: float) -> float | None:
        headers = SchedulingHeaders(comment_seconds=comment_seconds)
        return headers.read(sent({b"x-stainless-timeout": value}), streams=streams)[3]

    assert deadline(b"20", streams=True, comment_seconds=15.0) is None
    assert deadline(b"20", streams=True, comment_seconds=0.0) == ARRIVED + 20
    assert deadline(b"20", streams=False, comment_seconds=15.0) == ARRIVED + 20
    assert deadline(b"10", streams=True, comment_seconds=15.0) == ARRIVED + 10


def test_what_a_client_stores_belongs_to_its_key_and_tenant() -> None:
    by_key, by_header = SchedulingHeaders(), SchedulingHeaders("x-user")
    assert by_key.owner(sent({b"x-user": b"ann"}, TEAM)) == ("team", "team")
    assert by_header.owner(sent({b"x-user": b"ann"}, TEAM)) == ("team", "ann")
    assert by_header.owner(sent({b"x-user": b"ann"})) == ("", "ann")
    assert by_key.owner(sent({})) == ("", "")
