"""Long lists of documents in pieces: each client gets the scores, order and usage of a direct request."""

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import EMBEDDING_MODEL, Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.observed import comes_to_rest, samples, total

QUERY = "Which line speaks of the sea?"
TOPICS = ("the sea and its ships", "a cat on a mat", "trains that come late", "the price of bread")
LONG_IN_TOKENS = "!" * 300
Told = tuple[int, Any, dict[str, str]]


def lines(count: int) -> list[str]:
    """Documents of different sizes; some are there several times, so that there are ties."""
    return [
        f"Line {number % 90} is about {TOPICS[number % 4]}." + " And more." * (number % 5) for number in range(count)
    ]


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Told:
    async with session.post(url, json={"model": EMBEDDING_MODEL, **body}) as answer:
        return answer.status, await answer.json(), dict(answer.headers)


def scores(document: Any) -> dict[int, float]:
    """By the position of the document in the request."""
    entries = document.get("results") or document["data"]
    found = {entry["index"]: entry.get("relevance_score", entry.get("score")) for entry in entries}
    assert len(found) == len(entries)
    return found


def check_equal(through: Told, direct: Told) -> None:
    """The same scores, in the same order as far as an engine gives the same numbers twice; the same usage."""
    assert through[0] == direct[0] == 200, (through[1], direct[1])
    ours, theirs = through[1], direct[1]
    assert list(ours) == list(theirs)
    assert ours["usage"] == theirs["usage"]
    assert through[2]["x-gateway-usage"] == "exact"
    left, right = scores(ours), scores(theirs)
    in_common = left.keys() & right.keys()
    assert [left[index] for index in in_common] == pytest.approx([right[index] for index in in_common], abs=1e-5)
    assert list(left.values()) == pytest.approx(list(right.values()), abs=1e-5)
    if "results" in ours:
        ranked = [(-entry["relevance_score"], entry["index"]) for entry in ours["results"]]
        assert ranked == sorted(ranked)


@pytest.mark.parametrize(("path", "top_n"), [("/rerank", 0), ("/v1/rerank", 7), ("/v2/rerank", 1000)])
async def test_a_long_rerank_request_is_answered_as_a_direct_one(
    gateway: Gateway, fleet: Fleet, path: str, top_n: int
) -> None:
    await whole_fleet_is_up(gateway, fleet)
    body = {"query": QUERY, "documents": lines(200), "top_n": top_n}
    async with aiohttp.ClientSession() as session:
        before = total(await samples(gateway.admin_url), "gateway_embedding_splits_total")
        direct = await post(session, fleet.embedding_url + path, body)
        through = await post(session, gateway.url + path, body)
        after = total(await samples(gateway.admin_url), "gateway_embedding_splits_total")
    check_equal(through, direct)
    assert len(through[1]["results"]) == (7 if top_n == 7 else 200)
    assert after - before == 1
    texts = {entry["index"]: entry["document"]["text"] for entry in through[1]["results"]}
    assert all(text == body["documents"][index] for index, text in texts.items())  # type: ignore[index]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("one", ("text_1", "text_2")),
        ("list of one", ("queries", "documents")),
        ("each its own", ("data_1", "data_2")),
    ],
)
async def test_a_long_score_request_is_answered_as_a_direct_one(
    gateway: Gateway, fleet: Fleet, shape: str, names: tuple[str, str]
) -> None:
    await whole_fleet_is_up(gateway, fleet)
    documents = lines(150)
    queries: Any = {"one": QUERY, "list of one": [QUERY], "each its own": documents[::-1]}[shape]
    body = {names[0]: queries, names[1]: documents, "truncate_prompt_tokens": 12}
    async with aiohttp.ClientSession() as session:
        direct = await post(session, f"{fleet.embedding_url}/score", body)
        through = await post(session, f"{gateway.url}/v1/score", body)
    check_equal(through, direct)
    assert list(scores(through[1])) == list(range(150))


async def test_limits_on_queries_and_documents_count_as_in_a_direct_request(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    with start_gateway({"embeddings": {"max_batch_items": 8}}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        for limits in ({"max_tokens_per_query": 3}, {"max_tokens_per_doc": 4}, {"padding": "max_length"}):
            body = {"query": QUERY, "documents": lines(18), **limits}
            async with aiohttp.ClientSession() as session:
                direct = await post(session, f"{fleet.embedding_url}/rerank", body)
                through = await post(session, f"{gateway.url}/rerank", body)
            check_equal(through, direct)


async def test_errors_are_those_of_the_whole_request(gateway: Gateway, fleet: Fleet) -> None:
    await whole_fleet_is_up(gateway, fleet)
    for body in (
        {"query": QUERY, "documents": [*lines(150), LONG_IN_TOKENS]},
        {"query": QUERY, "documents": lines(150), "truncate_prompt_tokens": 100_000},
        {"query": QUERY, "documents": [*lines(150), 5]},
    ):
        async with aiohttp.ClientSession() as session:
            direct = await post(session, f"{fleet.embedding_url}/rerank", body)
            through = await post(session, f"{gateway.url}/rerank", body)
        error = direct[1].get("error")
        if error and "maximum context length" in error["message"]:  # with the code that clients know for it
            error["code"] = "context_length_exceeded"
        assert (through[0], through[1].get("error")) == (direct[0], error)


async def test_clients_that_leave_leave_nothing_behind(gateway: Gateway, fleet: Fleet) -> None:
    await whole_fleet_is_up(gateway, fleet)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(post(session, f"{gateway.url}/rerank", {"query": f"{n}", "documents": lines(100)}))
            for n in range(12)
        ]
        await asyncio.sleep(0.02)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, tuple) and answer[0] == 200 for answer in answers[1::2])
    await comes_to_rest(gateway.admin_url)


async def test_lists_are_not_cut_where_that_is_turned_off(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({"embeddings": {"coalesce": False}}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with aiohttp.ClientSession() as session:
            status, _, headers = await post(session, f"{gateway.url}/rerank", {"query": QUERY, "documents": lines(100)})
        assert status == 200
        assert "x-gateway-usage" not in headers
        assert total(await samples(gateway.admin_url), "gateway_embedding_splits_total") == 0
