import pytest

from gateway.config import KeyConfig
from gateway.errors import InvalidRequest
from gateway.front.read import Standing
from gateway.request import Ask
from tests.unit.front.wires import Sent

TEAM = KeyConfig(name="team", key="k", weight=4.0)
NIGHT = KeyConfig(name="night", key="n", priority="batch")
ARRIVED = 90.0


def standing(headers: dict[bytes, bytes] | None = None, key: KeyConfig | None = None, tenant_header: str = "") -> Ask:
    ask = Ask("m")
    Standing(tenant_header).give(ask, Sent(headers=headers or {}).incoming(), key)
    return ask


def test_without_a_key_and_headers_everybody_is_one_interactive_tenant() -> None:
    ask = standing()
    assert (ask.tenant, ask.weight, ask.batch, ask.deadline_seconds) == ("", 1.0, False, None)


def test_a_key_is_a_tenant_with_its_weight_and_class() -> None:
    assert (standing(key=TEAM).tenant, standing(key=TEAM).weight, standing(key=TEAM).batch) == ("team", 4.0, False)
    assert standing(key=NIGHT).batch


def test_a_configured_header_names_the_tenant_and_the_key_still_gives_the_weight() -> None:
    ask = standing({b"x-user": b" ann b "}, TEAM, tenant_header="X-User")
    assert (ask.tenant, ask.weight) == ("ann b", 4.0)


@pytest.mark.parametrize("headers", [{}, {b"x-user": b""}, {b"x-user": b"  "}])
def test_where_the_header_is_missing_or_empty_the_key_is_the_tenant(headers: dict[bytes, bytes]) -> None:
    assert standing(headers, TEAM, tenant_header="x-user").tenant == "team"


def test_a_header_that_is_not_configured_names_nobody() -> None:
    assert standing({b"x-user": b"ann"}, TEAM).tenant == "team"


@pytest.mark.parametrize("name", [b"x" * 129, b"a\x00b", b"a\nb", "ä".encode(), b"\xff"])
def test_a_name_that_is_long_or_not_plain_text_is_told_by_its_hash(name: bytes) -> None:
    told = standing({b"x-user": name}, tenant_header="x-user").tenant
    assert told.startswith("sha256-")
    assert len(told) == 23
    assert told != standing({b"x-user": name + b"!"}, tenant_header="x-user").tenant


def test_a_name_of_128_characters_is_kept() -> None:
    assert standing({b"x-user": b"x" * 128}, tenant_header="x-user").tenant == "x" * 128


@pytest.mark.parametrize(
    ("key", "told", "batch"),
    [
        (None, b"batch", True),
        (None, b"Interactive", False),
        (TEAM, b" BATCH ", True),
        (TEAM, b"interactive", False),
        (NIGHT, b"batch", True),
        (NIGHT, b"interactive", True),  # nobody rises above the key
    ],
)
def test_a_request_may_lower_its_class_and_not_raise_it(key: KeyConfig | None, told: bytes, batch: bool) -> None:
    assert standing({b"x-gateway-priority": told}, key).batch is batch


@pytest.mark.parametrize("told", [b"", b"high", b"batch,interactive", b"1"])
def test_a_class_that_does_not_exist_is_refused(told: bytes) -> None:
    with pytest.raises(InvalidRequest, match="interactive or batch"):
        standing({b"x-gateway-priority": told})


@pytest.mark.parametrize(("told", "seconds"), [(b"1500", 1.5), (b"0.5", 0.0005), (b" 250 ", 0.25)])
def test_a_deadline_counts_from_the_requests_arrival(told: bytes, seconds: float) -> None:
    assert standing({b"x-gateway-deadline-ms": told}).deadline_seconds == pytest.approx(ARRIVED + seconds)


@pytest.mark.parametrize("told", [b"", b"0", b"0.0", b"-1", b"1e3", b"inf", b"nan", b"1_0", b"soon", b"1" * 13])
def test_a_deadline_that_is_no_positive_number_is_refused(told: bytes) -> None:
    with pytest.raises(InvalidRequest, match="positive number of milliseconds"):
        standing({b"x-gateway-deadline-ms": told})


@pytest.mark.parametrize("name", [b"x-stainless-read-timeout", b"x-stainless-timeout"])
@pytest.mark.parametrize(("told", "seconds"), [(b"600", 600.0), (b"12.5", 12.5)])
def test_the_time_out_of_an_sdk_is_a_deadline(name: bytes, told: bytes, seconds: float) -> None:
    assert standing({name: told}).deadline_seconds == ARRIVED + seconds


@pytest.mark.parametrize("told", [b"", b"0", b"-1", b"None", b"inf", b"nan", b"NOT_GIVEN"])
def test_a_time_out_of_an_sdk_that_is_no_positive_number_says_nothing(told: bytes) -> None:
    assert standing({b"x-stainless-read-timeout": told}).deadline_seconds is None


def test_the_gateways_own_deadline_goes_before_the_sdks() -> None:
    ask = standing({b"x-gateway-deadline-ms": b"1000", b"x-stainless-read-timeout": b"600"})
    assert ask.deadline_seconds == ARRIVED + 1.0


def test_the_sdk_of_a_stream_that_gets_comments_in_time_is_patient() -> None:
    def deadline(told: bytes, *, streams: bool, comment_seconds: float) -> float | None:
        ask = Ask("m", streams=streams)
        Standing(comment_seconds=comment_seconds).give(
            ask, Sent(headers={b"x-stainless-timeout": told}).incoming(), None
        )
        return ask.deadline_seconds

    assert deadline(b"20", streams=True, comment_seconds=15.0) is None
    assert deadline(b"20", streams=True, comment_seconds=0.0) == ARRIVED + 20
    assert deadline(b"20", streams=False, comment_seconds=15.0) == ARRIVED + 20
    assert deadline(b"10", streams=True, comment_seconds=15.0) == ARRIVED + 10


def test_what_a_client_stores_belongs_to_its_key_and_tenant() -> None:
    by_key, by_header = Standing(), Standing("x-user")
    assert by_key.owner({b"x-user": b"ann"}, TEAM) == ("team", "team")
    assert by_header.owner({b"x-user": b"ann"}, TEAM) == ("team", "ann")
    assert by_header.owner({b"x-user": b"ann"}, None) == ("", "ann")
    assert by_key.owner({}, None) == ("", "")
