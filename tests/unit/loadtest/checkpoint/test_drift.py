"""What has changed on a server is named."""

from loadtest.checkpoint.command import drift
from loadtest.checkpoint.document import ModelCard, ProcessInfo, ServerInfo, Status
from tests.unit.loadtest.checkpoint.made import ENGINE

PROCESS = ProcessInfo(pid=1, command=["vllm", "serve", "m"], environment={"OMP_NUM_THREADS": "1"}, started_at="then")
BEFORE = ENGINE.model_copy(
    update={
        "version": "0.33.0",
        "models": [ModelCard(id="m")],
        "cache_config": [{"block_size": "16"}],
        "process": PROCESS,
    }
)


def changed(now: ServerInfo) -> dict[str, tuple[Status, str, str]]:
    return {check.name: (check.status, check.expected, check.found) for check in drift(BEFORE, now)}


def test_the_same_server_is_as_it_was_though_it_was_started_again() -> None:
    again = BEFORE.model_copy(update={"process": PROCESS.model_copy(update={"pid": 2, "started_at": "now"})})
    [(name, (status, _, _))] = changed(again).items()
    assert (name, status) == ("a is as recorded", Status.OK)


def test_each_fact_that_differs_is_named_with_what_it_was_and_is() -> None:
    other = PROCESS.model_copy(update={"command": ["vllm", "serve", "n"], "environment": {}})
    now = BEFORE.model_copy(
        update={
            "version": "0.34.0",
            "models": [ModelCard(id="n")],
            "cache_config": [{"block_size": "32"}],
            "process": other,
        }
    )
    assert changed(now) == {
        "version of a": (Status.FAILED, "0.33.0", "0.34.0"),
        "models of a": (Status.FAILED, "[0].id m", "[0].id n"),
        "cache_config of a": (Status.FAILED, "[0].block_size 16", "[0].block_size 32"),
        "command of a": (Status.FAILED, "[2] m", "[2] n"),
        "environment of a": (Status.FAILED, "OMP_NUM_THREADS 1", "OMP_NUM_THREADS absent"),
    }


def test_a_server_that_refuses_now_has_changed() -> None:
    assert changed(BEFORE.model_copy(update={"refused": "/v1/models answers 401"}))["refused of a"][0] is Status.FAILED


def test_a_command_that_cannot_be_seen_is_not_passed() -> None:
    found = changed(BEFORE.model_copy(update={"process": None, "process_unknown": "another machine"}))
    assert found["command of a"][0] is Status.NOT_CHECKED
