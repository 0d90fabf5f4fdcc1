"""Files and batches by the OpenAI SDK: upload, run, look, list, download, cancel, delete."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import openai
import orjson
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from tests.integration.conftest import whole_fleet_is_up
from tests.integration.fleet import CHAT_MODEL, EMBEDDING_MODEL, Fleet
from tests.integration.gateway_process import Gateway, config_for, running_gateway
from tests.integration.observed import eventually, gateway_holds_nothing, read

CHAT = "/v1/chat/completions"
KEYS = [{"name": "a", "key": "sk-a"}, {"name": "b", "key": "sk-b", "requests_per_minute": 1}]


def chat_line(name: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    """A line with a short conversation, whose answer has exactly so many tokens."""
    body = {
        "model": CHAT_MODEL,
        "messages": [{"role": "user", "content": f"Hello {name}."}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {**body, **more}}


def text_of(lines: Iterable[dict[str, Any]]) -> bytes:
    """Lines as a file."""
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


@pytest.fixture(scope="module")
def gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with batches, and two keys."""
    folder = tmp_path_factory.mktemp("gateway")
    sections = {"batches": {"path": str(folder / "batches")}, "auth": {"keys": KEYS}}
    with running_gateway(folder, config_for(fleet, sections, {})) as running:
        yield running


@pytest.fixture
async def sdk(gateway: Gateway, fleet: Fleet) -> AsyncIterator[AsyncOpenAI]:
    """The SDK with the first key; what earlier tests made is gone."""
    await whole_fleet_is_up(gateway, fleet)
    async with gateway.client("sk-a") as client:
        async for file in client.files.list():
            await client.files.delete(file.id)
        yield client


async def submit(sdk: AsyncOpenAI, lines: Iterable[dict[str, Any]], endpoint: Any = CHAT, **more: Any) -> Batch:
    """Upload lines and start a batch."""
    file = await sdk.files.create(file=("input.jsonl", text_of(lines)), purpose="batch")
    return await sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(sdk: AsyncOpenAI, batch: Batch) -> Batch:
    """Wait until the batch has ended."""
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        await asyncio.sleep(0.05)
        batch = await sdk.batches.retrieve(batch.id)
    return batch


async def lines_of(sdk: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a result by custom id."""
    assert file_id is not None
    content = (await sdk.files.content(file_id)).content
    assert content.endswith(b"\n")
    lines = [orjson.loads(line) for line in content.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


async def test_a_batch_from_upload_to_download(sdk: AsyncOpenAI, gateway: Gateway) -> None:
    names = [f"line-{number}" for number in range(100)]
    batch = await submit(sdk, map(chat_line, names), metadata={"job": "nightly"})
    assert batch.status == "validating"
    assert batch.errors is None
    assert batch.metadata == {"job": "nightly"}
    assert batch.expires_at == batch.created_at + 86400
    batch = await ended(sdk, batch)
    assert (batch.status, batch.model, batch.error_file_id) == ("completed", CHAT_MODEL, None)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
    assert batch.in_progress_at
    assert batch.finalizing_at
    assert batch.completed_at
    answers = await lines_of(sdk, batch.output_file_id)
    assert set(answers) == set(names)
    bodies = [line["response"]["body"] for line in answers.values()]
    assert {line["response"]["status_code"] for line in answers.values()} == {200}
    assert {line["error"] for line in answers.values()} == {None}
    assert all(line["id"].startswith("batch_req_") for line in answers.values())
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(body["usage"]["completion_tokens"] for body in bodies) == 400
    assert batch.usage.input_tokens == sum(body["usage"]["prompt_tokens"] for body in bodies)
    cached = [(body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) for body in bodies]
    assert batch.usage.input_tokens_details.cached_tokens == sum(cached)
    assert await read(gateway.admin_url, "gateway_batch_lines_total", state="completed") == 100
    assert await read(gateway.admin_url, "gateway_requests_total", endpoint="chat", outcome="completed") == 100
    await gateway_holds_nothing(gateway.admin_url)


async def test_files_are_listed_page_by_page_shown_and_deleted(sdk: AsyncOpenAI) -> None:
    made = [
        await sdk.files.create(
            file=(f"{number}.jsonl", text_of([chat_line(str(number))])),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        for number in range(5)
    ]
    assert [file.id async for file in sdk.files.list(limit=2)] == [file.id for file in reversed(made)]
    assert [file.id async for file in sdk.files.list(limit=2, order="asc", purpose="batch")] == [f.id for f in made]
    assert [file.id async for file in sdk.files.list(purpose="batch_output")] == []
    first = await sdk.files.retrieve(made[0].id)
    assert first == made[0]
    assert (first.filename, first.purpose, first.status) == ("0.jsonl", "batch", "processed")
    assert first.expires_at == first.created_at + 3600
    assert (await sdk.files.content(first.id)).content == text_of([chat_line("0")])
    assert (await sdk.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await sdk.files.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.files.content(first.id)


async def test_batches_are_listed_page_by_page_the_newest_first(sdk: AsyncOpenAI) -> None:
    batches = [await submit(sdk, [chat_line(str(number))]) for number in range(5)]
    listed = [batch.id async for batch in sdk.batches.list(limit=2)]
    assert listed[:5] == [batch.id for batch in reversed(batches)]
    for batch in batches:
        assert (await ended(sdk, batch)).status == "completed"
    assert {batch.status async for batch in sdk.batches.list(limit=3)} <= {"completed", "cancelled", "failed"}
    with pytest.raises(openai.BadRequestError):
        await sdk.batches.list(after="batch_unknown")


async def test_what_belongs_to_a_key_is_not_there_for_another(sdk: AsyncOpenAI, gateway: Gateway) -> None:
    batch = await submit(sdk, [chat_line("a")])
    async with gateway.client("sk-b", max_retries=0) as other:
        for asked in (
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.input_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked
        assert batch.input_file_id not in [file.id async for file in other.files.list()]
        assert batch.id not in [each.id async for each in other.batches.list()]
    assert (await ended(sdk, batch)).status == "completed"


async def test_rate_limits_of_the_key_do_not_apply_to_lines(gateway: Gateway) -> None:
    async with gateway.client("sk-b") as sdk:
        batch = await ended(sdk, await submit(sdk, [chat_line(str(number)) for number in range(10)]))
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 10


async def test_a_line_that_is_refused_is_in_the_error_file_and_the_batch_completes(sdk: AsyncOpenAI) -> None:
    wrong = chat_line("wrong", temperature="hot")
    batch = await ended(sdk, await submit(sdk, [chat_line("right"), wrong, chat_line("long", tokens=1000000)]))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert set(await lines_of(sdk, batch.output_file_id)) == {"right"}
    errors = await lines_of(sdk, batch.error_file_id)
    assert set(errors) == {"wrong", "long"}
    assert errors["wrong"]["error"] is None
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["message"]
    output = await sdk.files.retrieve(batch.error_file_id or "")
    assert output.purpose == "batch_output"
    assert output.filename == f"{batch.id}_error.jsonl"


@pytest.mark.parametrize(
    ("endpoint", "model", "body"),
    [
        ("/v1/completions", CHAT_MODEL, {"prompt": "Once", "max_tokens": 3}),
        ("/v1/responses", CHAT_MODEL, {"input": "Hello.", "max_output_tokens": 3}),
        ("/v1/embeddings", EMBEDDING_MODEL, {"input": "A text."}),
        ("/v1/score", EMBEDDING_MODEL, {"text_1": "A query", "text_2": ["One", "Two"]}),
        ("/v1/rerank", EMBEDDING_MODEL, {"query": "A query", "documents": ["One", "Two"]}),
    ],
)
async def test_every_endpoint(sdk: AsyncOpenAI, endpoint: str, model: str, body: dict[str, Any]) -> None:
    lines = [{"custom_id": name, "method": "POST", "url": endpoint, "body": {"model": model, **body}} for name in "abc"]
    batch = await ended(sdk, await submit(sdk, lines, endpoint))
    assert batch.status == "completed", batch.errors
    answers = await lines_of(sdk, batch.output_file_id)
    assert set(answers) == {"a", "b", "c"}
    assert batch.usage is not None
    assert batch.usage.input_tokens > 0


async def test_a_cancelled_batch_keeps_what_is_done(sdk: AsyncOpenAI) -> None:
    lines = [chat_line(str(number), tokens=1 if number < 20 else 64) for number in range(2000)]
    batch = await submit(sdk, lines)

    async def some_are_done() -> bool:
        counts = (await sdk.batches.retrieve(batch.id)).request_counts
        return counts is not None and counts.completed >= 10

    await eventually(some_are_done, "lines are done", 90.0)
    with pytest.raises(openai.ConflictError):
        await sdk.files.delete(batch.input_file_id)
    assert (await sdk.batches.cancel(batch.id)).status == "cancelling"
    assert (await sdk.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(sdk, batch)
    assert (batch.status, batch.cancelled_at is None) == ("cancelled", False)
    done, not_done = await lines_of(sdk, batch.output_file_id), await lines_of(sdk, batch.error_file_id)
    assert len(done) + len(not_done) == 2000
    assert len(done) >= 10
    assert {line["error"]["code"] for line in not_done.values()} == {"batch_cancelled"}
    assert {line["response"] for line in not_done.values()} == {None}
    with pytest.raises(openai.ConflictError):
        await sdk.batches.cancel((await ended(sdk, await submit(sdk, [chat_line("x")]))).id)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"completion_window": "1w"}, "completion_window"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_a_batch_that_cannot_be_created(sdk: AsyncOpenAI, changes: dict[str, Any], param: str) -> None:
    settings: dict[str, Any] = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h", **changes}
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.batches.create(**settings)
    assert refused.value.param == param


async def test_a_bad_file_fails_the_batch_with_the_numbers_of_its_lines(sdk: AsyncOpenAI) -> None:
    lines = [chat_line("a"), chat_line("a"), {**chat_line("b"), "url": "/v1/completions"}, chat_line("c", model="x")]
    batch = await ended(sdk, await submit(sdk, lines))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    found = [(error.line, error.code) for error in batch.errors.data]
    assert found == [(2, "duplicate_custom_id"), (3, "mismatched_endpoint"), (4, "mismatched_model")]
    unknown = await ended(sdk, await submit(sdk, [chat_line("a", model="nowhere")]))
    assert unknown.errors is not None
    assert [error.code for error in unknown.errors.data or ()] == ["model_not_found"]


@pytest.mark.parametrize("purpose", ["assistants", "fine-tune"])
async def test_only_files_for_batches_are_taken(sdk: AsyncOpenAI, purpose: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.files.create(file=("input.jsonl", b"{}"), purpose=purpose)
    assert refused.value.param == "purpose"
