"""Caps and sums, from a run's own books."""

from loadtest.checkpoint.document import Role, Status
from loadtest.checkpoint.keep import caps, usage
from tests.unit.loadtest.checkpoint.made import ENGINE, GATEWAY, page, plan, record, results

PLAN = plan()
SERVERS = [GATEWAY, ENGINE]
ONE_BY_ONE = [record(PLAN, 0, 0.0), record(PLAN, 1, 0.0), record(PLAN, 2, 1.1)]


def test_what_is_within_the_cap_holds() -> None:
    [check] = caps(results(PLAN, ONE_BY_ONE), ONE_BY_ONE, SERVERS)
    assert (check.status, check.expected) == (Status.OK, "at most 2")
    assert check.found.startswith("surely 2;")


def test_a_third_that_decodes_at_the_same_time_breaks_the_cap() -> None:
    records = [record(PLAN, index, 0.0) for index in range(3)]
    [check] = caps(results(PLAN, records), records, SERVERS)
    assert check.status is Status.FAILED
    assert check.found.startswith("surely 3;")


def test_an_end_that_reaches_the_client_late_does_not() -> None:
    records = [*ONE_BY_ONE[:2], record(PLAN, 2, 0.99, first_token=0.995)]
    [check] = caps(results(PLAN, records), records, SERVERS)
    assert check.status is Status.OK
    assert "3 as the client sees it" in check.found


def test_the_engine_is_believed_where_the_client_sees_nothing() -> None:
    found = results(PLAN, ONE_BY_ONE, pages=[page(running=3)])
    [check] = caps(found, ONE_BY_ONE, SERVERS)
    assert check.status is Status.FAILED
    assert "3 by the engine" in check.found


def test_lists_that_are_longer_than_the_cap_are_not_held_against_it() -> None:
    lists = plan(workload={"kind": "texts", "inputs": [1, 8]}, endpoint="embeddings", stream=False)
    found = results(lists, ONE_BY_ONE, pages=[page(running=8)])
    [check] = caps(found, ONE_BY_ONE, SERVERS)
    assert check.status is Status.OK


def test_caps_that_are_not_known_are_not_passed() -> None:
    unknown = GATEWAY.model_copy(update={"backends": []})
    [check] = caps(results(PLAN, ONE_BY_ONE), ONE_BY_ONE, [unknown, ENGINE])
    assert (check.status, check.why) == (Status.NOT_CHECKED, "the caps are not known: give --admin-url")
    direct = ENGINE.model_copy(update={"driven": True})
    [check] = caps(results(PLAN, ONE_BY_ONE), ONE_BY_ONE, [direct])
    assert check.status is Status.NOT_CHECKED
    other = GATEWAY.model_copy(update={"backends": [{"name": "b", "limit_upper": 2}]})
    [check] = caps(results(PLAN, ONE_BY_ONE), ONE_BY_ONE, [other])
    assert check.status is Status.NOT_CHECKED


def test_sums_that_are_equal_hold() -> None:
    check = usage(results(PLAN, ONE_BY_ONE), SERVERS)
    assert (check.status, check.found) == (Status.OK, "300 + 33 by the engines")


def test_a_token_that_the_engine_did_not_count_is_found() -> None:
    counted = {"vllm:prompt_tokens_total": 300.0, "vllm:generation_tokens_total": 32.0}
    check = usage(results(PLAN, ONE_BY_ONE, counted), SERVERS)
    assert check.status is Status.FAILED
    assert (check.expected, check.found) == ("300 + 33 tokens, as reported to clients", "300 + 32 by the engines")


def test_several_engines_add_up_and_other_pages_count_for_nothing() -> None:
    counted = {
        'a vllm:prompt_tokens_total{engine="0"}': 100.0,
        "b vllm:prompt_tokens_total": 200.0,
        "a vllm:generation_tokens_total": 11.0,
        "b vllm:generation_tokens_total": 22.0,
        "elsewhere vllm:prompt_tokens_total": 5.0,
    }
    records = [*ONE_BY_ONE[:2], record(PLAN, 2, 1.1, backend="b")]
    pages = [page(), page("b", "http://b:8000/metrics")]
    assert usage(results(PLAN, records, counted, pages), SERVERS).status is Status.OK
    missing = usage(results(PLAN, records, counted, pages[:1]), SERVERS)
    assert (missing.status, missing.why) == (Status.NOT_CHECKED, "metrics of b were not read")


def test_after_failures_engines_may_have_done_more_and_not_less() -> None:
    records = [*ONE_BY_ONE, record(PLAN, 3, 2.0, outcome="stream_without_done")]
    more = {"vllm:prompt_tokens_total": 400.0, "vllm:generation_tokens_total": 40.0}
    less = more | {"vllm:prompt_tokens_total": 299.0}
    assert usage(results(PLAN, records, more), SERVERS).status is Status.OK
    assert usage(results(PLAN, records, less), SERVERS).status is Status.FAILED


def test_sums_that_cannot_be_compared_say_why() -> None:
    silent = [record(PLAN, 0, 0.0, prompt_tokens=None, completion_tokens=None)]
    for found, why in (
        (results(PLAN, silent, {"x": 1.0}), "1 answers reported no usage"),
        (results(PLAN, [record(PLAN, 0, 0.0, audio_seconds=5.0)]), "usage of audio"),
        (results(PLAN, ONE_BY_ONE, pages=[]), "no engine's metrics were read"),
        (results(PLAN, ONE_BY_ONE, {}), "no counter could be read after the run"),
        (results(PLAN, [record(PLAN, 0, 0.0, backend=None)]), "do not name their backend"),
    ):
        check = usage(found, SERVERS)
        assert check.status is Status.NOT_CHECKED
        assert why in check.why


def test_a_backend_is_known_by_its_name_in_the_gateway_by_its_port_and_by_the_pages_name() -> None:
    named = GATEWAY.model_copy(update={"backends": [{"name": "gpu-1", "url": "http://a:8000", "limit_upper": 2}]})
    for name, servers in (("gpu-1", [named]), ("a:8000", [GATEWAY]), ("a", [GATEWAY]), ("a", [GATEWAY, ENGINE])):
        records = [record(PLAN, 0, 0.0, backend=name)]
        assert usage(results(PLAN, records, pages=[page("a")]), servers).status is Status.OK


def test_a_direct_run_is_counted_by_its_own_page() -> None:
    direct = ENGINE.model_copy(update={"driven": True, "role": Role.ENGINE})
    records = [record(PLAN, 0, 0.0, backend=None)]
    assert usage(results(PLAN, records, pages=[page("engine")]), [direct]).status is Status.OK
