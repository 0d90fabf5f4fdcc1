"""Another model answers while a request's own model cannot, once at most, and never after the first byte."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.backends.backend import OFFLOADED
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.settings import SleepConfig
from gateway.core.errors import (
    BackendBusy,
    BackendError,
    BackendFault,
    ConnectFailed,
    DeadlineUnmeetable,
    EndpointNotOffered,
    FreshConnectionClosed,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    NoBackend,
    QueueFull,
    WaitExpired,
)
from gateway.core.front.reply import ClientResponse
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, ModelChoice, UpstreamResult
from gateway.core.turns import Steps
from gateway.features.models.fallback import Fallbacks, reason_for
from tests.unit.dispatching import WELL, Scene, request
from tests.unit.scheduling.virtual_time import run

FULL, LATE, NONE = QueueFull("full"), DeadlineUnmeetable("late"), NoBackend.of("m", "now")


def for_model(asked: InferenceRequest, model: str) -> Steps[InferenceRequest]:
    yield
    return replace(asked, demand=Demand(model, streams=True), document={})


def with_fallbacks(*names: str, alias: str = "", **ask: Any) -> InferenceRequest:
    return replace(request(**ask), model_choice=ModelChoice(alias, names, for_model))


class Story:
    """Backend a serves m, b serves n, c serves o; a dispatcher answers by a script, and `m` may be lost meanwhile."""

    def __init__(self, *script: UpstreamResult | GatewayError | Callable[[], GatewayError]) -> None:
        self.scene = Scene()
        self.fleet = self.scene.fleet
        for name, model in zip("abc", "mno", strict=True):
            self.serve(name, model)
        self.script = list(script)
        self.sent: list[InferenceRequest] = []
        self.reasons: list[tuple[str, str, str]] = []
        self.record, self.reply = self.scene.record, self.scene.reply
        clock = asyncio.get_running_loop().time
        self.fallbacks = Fallbacks(self.fleet, self, self.complete, fell_back=self.reasons.append, clock=clock)

    def serve(self, name: str, *models: str) -> None:
        cards = tuple(map(ModelCard, models))
        self.fleet.learned(self.scene.backend(name), Facts(models=cards))

    async def complete(self, request: InferenceRequest) -> InferenceRequest:
        return replace(request, document=None)

    async def dispatch(self, asked: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        assert reply is self.reply
        assert record is self.record
        self.sent.append(asked)
        step = self.script.pop(0)
        if not isinstance(step, UpstreamResult | GatewayError):
            step = step()
        if isinstance(step, BackendError):
            record.placed(asked.demand.model, "a", 0.0, 0)
        if isinstance(step, GatewayError):
            raise step
        return step

    def lost(self, error: GatewayError) -> Callable[[], GatewayError]:
        """The backend of m goes down, and the request fails."""

        def step() -> GatewayError:
            self.serve("a")
            return error

        return step

    async def ask(self, asked: InferenceRequest | None = None) -> UpstreamResult:
        return await self.fallbacks.dispatch(asked or with_fallbacks("n", "o"), self.reply, self.record)

    @property
    def models(self) -> list[str]:
        return [each.demand.model for each in self.sent]


def test_a_request_that_its_own_model_can_take_stays_there() -> None:
    async def main() -> None:
        story = Story(WELL)
        assert await story.ask() is WELL
        assert (story.models, story.reasons, story.record.fell_back_from) == (["m"], [], "")
        assert story.sent[0].model_choice is not None

    run(main())


@pytest.mark.parametrize(("error", "reason"), [(FULL, "queue_full"), (LATE, "deadline"), (NONE, "no_backend")])
def test_another_model_takes_its_place(error: GatewayError, reason: str) -> None:
    async def main() -> None:
        story = Story(error, WELL)
        asked = with_fallbacks("n", "o", alias="gpt", deadline_seconds=2000.0)
        assert await story.ask(asked) is WELL
        assert (story.models, story.reasons) == (["m", "n"], [("m", "n", reason)])
        assert story.sent[1].model_choice == ModelChoice("gpt", fell_back_from="m")
        assert story.sent[1].document is None
        assert (story.record.alias, story.record.fell_back_from) == ("gpt", "m")

    run(main())


def test_a_model_without_a_backend_is_not_even_tried() -> None:
    async def main() -> None:
        story = Story(WELL)
        story.serve("a")
        await story.ask()
        assert (story.models, story.reasons) == (["n"], [("m", "n", "no_backend")])

    run(main())


def test_a_backend_that_can_be_woken_is_waited_for() -> None:
    async def main() -> None:
        story = Story(WELL)
        backend = story.scene.backend("a")
        backend.reconfigure(backend.config.model_copy(update={"sleep": SleepConfig()}))
        story.fleet.slept(backend, OFFLOADED)
        await story.ask()
        assert (story.models, story.sent[0].model_choice) == (["m"], None)
        story = Story(WELL)
        story.fleet.slept(story.scene.backend("a"), OFFLOADED)  # and nothing wakes it
        await story.ask()
        assert story.models == ["n"]

    run(main())


def test_the_first_fallback_with_a_backend_is_taken() -> None:
    async def main() -> None:
        story = Story(FULL, WELL)
        story.serve("b")
        await story.ask()
        assert story.models == ["m", "o"]

    run(main())


def test_without_any_backend_the_request_waits_for_its_own_model() -> None:
    async def main() -> None:
        for alias, choice in (("", None), ("gpt", ModelChoice("gpt"))):
            story = Story(WELL)
            for name in "abc":
                story.serve(name)
            await story.ask(with_fallbacks("n", "o", alias=alias))
            assert [each.model_choice for each in story.sent] == [choice]
            assert (story.models, story.reasons) == (["m"], [])

    run(main())


def test_a_request_whose_last_backend_is_lost_waits_if_the_others_are_lost_too() -> None:
    async def main() -> None:
        story = Story(NONE, WELL)
        for name in "bc":
            story.serve(name)
        await story.ask()
        assert story.models == ["m", "m"]
        assert story.sent[1].model_choice is None
        story = Story(FULL)
        for name in "bc":
            story.serve(name)
        with pytest.raises(QueueFull):
            await story.ask()

    run(main())


@pytest.mark.parametrize("second", [FULL, LATE, NONE, EndpointNotOffered("no"), ModelNotFound("gone")])
def test_there_is_one_step_and_then_the_first_error(second: GatewayError) -> None:
    async def main() -> None:
        first = QueueFull("the queue of m is full")
        story = Story(first, second)
        with pytest.raises(QueueFull) as error:
            await story.ask()
        assert error.value.message == first.message
        assert story.models == ["m", "n"]
        story = Story(second)
        story.serve("a")
        with pytest.raises(NoBackend, match="No backend for model 'm'"):
            await story.ask()

    run(main())


@pytest.mark.parametrize("second", [BackendFault("broken"), WaitExpired("waited"), InvalidRequest("too long")])
def test_how_the_fallback_failed_is_said_once_it_was_tried(second: GatewayError) -> None:
    async def main() -> None:
        story = Story(FULL, second)
        with pytest.raises(type(second)):
            await story.ask()

    run(main())


@pytest.mark.parametrize(
    ("error", "executions", "reason"),
    [
        (ConnectFailed("why"), 1, "no_backend"),
        (FreshConnectionClosed("why"), 1, "no_backend"),
        (FreshConnectionClosed("why"), 2, ""),
        (BackendBusy("why"), 1, "no_backend"),
        (BackendFault("why"), 1, ""),
        (WaitExpired("why"), 0, ""),
        (InvalidRequest("why"), 0, ""),
    ],
)
def test_a_request_goes_to_no_more_backends_than_without_fallbacks(
    error: GatewayError, executions: int, reason: str
) -> None:
    assert reason_for(error, request(), executions, 0.0, is_served=False) == reason
    if isinstance(error, BackendError):
        assert reason_for(error, request(), executions, 0.0, is_served=True) == ""


def test_what_may_not_be_sent_twice_is_not() -> None:
    once = replace(request(), repeatable=False)
    assert reason_for(FreshConnectionClosed("why"), once, 1, 0.0, is_served=False) == ""
    assert reason_for(ConnectFailed("why"), once, 1, 0.0, is_served=False) == "no_backend"


def test_a_deadline_that_has_passed_is_not_met_by_another_model_either() -> None:
    late = request(deadline_seconds=9.0)
    assert [reason_for(LATE, late, 0, now, is_served=True) for now in (8.0, 9.0)] == ["deadline", ""]


def test_a_backend_that_dies_under_the_request_is_replaced() -> None:
    async def main() -> None:
        story = Story(WELL)
        story.script.insert(0, story.lost(FreshConnectionClosed("why")))
        assert await story.ask() is WELL
        assert story.models == ["m", "n"]

    run(main())


def test_nothing_is_sent_again_after_the_first_byte() -> None:
    async def main() -> None:
        story = Story()

        def begun() -> GatewayError:
            story.reply.begin(200, b"text/event-stream", b"")
            story.serve("a")
            return FreshConnectionClosed("why")

        story.script.append(begun)
        with pytest.raises(FreshConnectionClosed):
            await story.ask()

    run(main())
