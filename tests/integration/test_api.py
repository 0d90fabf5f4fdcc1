"""The table of docs/api.md: each call works, or is refused with the error that the table states."""

import re

import pytest
from openai import APIStatusError, AsyncOpenAI, NotFoundError

from tests.integration.api_calls import BOTH, OTHER_CALLS, PEER, REAL, SDK_CALLS, SIMULATED, Call, Scene
from tests.integration.api_refusals import REFUSALS, Refusal, call, methods_of, refused_methods
from tests.integration.conftest import StartGateway, engine_kind
from tests.integration.fleet import Fleet
from tests.integration.gateway_process import Gateway
from tests.routes import ROUTES

RUNS_ON = {"sim": (BOTH, SIMULATED, PEER), "vllm": (BOTH, REAL, PEER)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the SDK's, of calls that OpenAI is about to end
@pytest.mark.parametrize("each", SDK_CALLS + OTHER_CALLS, ids=lambda each: each.name)
async def test_a_call_works_or_is_refused_where_the_engine_does_not_offer_it(
    client: AsyncOpenAI,
    gateway: Gateway,
    fleet: Fleet,
    start_gateway: StartGateway,
    request: pytest.FixtureRequest,
    each: Call,
) -> None:
    scene = Scene(client, gateway.url, fleet, start_gateway)
    if each.proved_on in RUNS_ON[engine_kind(request.config)]:
        await each.proof(scene)
        return
    with pytest.raises((NotFoundError, AssertionError, ValueError)) as caught:
        await each.proof(scene)
    if isinstance(caught.value, NotFoundError):
        assert caught.value.code == "endpoint_not_offered"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.names[0])
async def test_a_part_of_the_sdk_is_refused_with_the_error_of_the_table(gateway: Gateway, refusal: Refusal) -> None:
    async with gateway.client(admin_api_key="none") as sdk:
        methods = refused_methods(sdk, refusal)
        assert all(any(name.startswith(each) for name in methods) for each in refusal.names)
        for name, method in methods.items():
            with pytest.raises(APIStatusError) as caught:
                await call(method)
            error = caught.value
            assert (error.status_code, error.code) == (refusal.status, refusal.code), name
            assert error.type == "invalid_request_error"
            assert error.request.method in error.message
            assert error.response.headers["x-should-retry"] == "false"


async def test_every_call_of_the_table_is_one_of_the_sdk(gateway: Gateway) -> None:
    async with gateway.client() as sdk:
        known = methods_of(sdk)
    assert {each.name.partition("(")[0] for each in SDK_CALLS} - set(known) == set()


def test_every_route_of_the_gateway_is_in_the_table() -> None:
    text = " ".join(f"{each.name} {each.route}" for each in SDK_CALLS + OTHER_CALLS)
    shown = set(re.findall(r"/[^ ,)]+", text))
    assert {path.decode() for _, path in ROUTES} - shown == set()
