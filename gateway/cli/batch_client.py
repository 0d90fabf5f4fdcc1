"""A file of requests as a batch of a gateway: uploaded, watched with a progress bar, and its answers downloaded."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gateway.core.threads import Threads

_POLL_SECONDS = 0.5
_RETRY_SECONDS = 2.0
_MOST_UNREACHABLE = 60  # tries in a row: the gateway may be restarting
_LINE_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 18
_RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
_MOST_ERRORS = 10  # shown


class BatchFailed(Exception):
    """The batch could not be run; the message gives the reasons."""


@dataclass(frozen=True, slots=True)
class BatchTask:
    """The input of a batch, and the destination of its answers."""

    file: Path
    output: Path
    errors: Path
    _: KW_ONLY
    endpoint: str
    window: str

    @classmethod
    def of(cls, file: Path, output: Path, errors: Path | None, endpoint: str, window: str) -> "BatchTask":
        """Raises BatchFailed if the endpoint is not given, and the first line has none."""
        if not endpoint:
            with open(file, "rb") as source:
                first = source.readline(_LINE_BYTES).removeprefix(b"\xef\xbb\xbf")
            with suppress(orjson.JSONDecodeError, AttributeError):
                endpoint = orjson.loads(first).get("url")
        if type(endpoint) is not str or not endpoint:
            raise BatchFailed(f"{file}: the first line has no `url`, such as /v1/chat/completions")
        return cls(file, output, errors or output.with_suffix(".errors.jsonl"), endpoint=endpoint, window=window)


class BatchClient:
    """Speaks OpenAI's Files and Batches API with one gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._threads = Threads("files")

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str, api_key: str) -> AsyncIterator["BatchClient"]:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=120.0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            yield cls(session, url)

    async def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Raises BatchFailed if the gateway refuses, and aiohttp.ClientError or TimeoutError if it is unreachable."""
        async with self._session.request(method, self._url + path, **options) as answer:
            document: Any = None
            with suppress(orjson.JSONDecodeError):
                document = orjson.loads(await answer.read())
            if answer.status == 200 and type(document) is dict:
                return document
            reason = document.get("error") if type(document) is dict else None
            message = reason.get("message") if type(reason) is dict else f"{path} returned {answer.status}"
            if answer.status in (429, 502, 503):
                raise aiohttp.ClientError(message)
            raise BatchFailed(f"{self._url}: {message}")

    async def submit(self, task: BatchTask) -> str:
        """Upload the file and start a batch. Returns its id."""
        try:
            with await self._threads.run(open, task.file, "rb") as source:
                form = aiohttp.FormData()
                form.add_field("purpose", "batch")
                form.add_field("file", source, filename=task.file.name, content_type="application/octet-stream")
                file_id = (await self._ask("POST", "/v1/files", data=form))["id"]
            wanted = {"input_file_id": file_id, "endpoint": task.endpoint, "completion_window": task.window}
            return str((await self._ask("POST", "/v1/batches", json=wanted))["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BatchFailed(f"{self._url} is unreachable or busy: {error}") from None

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """The batch as it is now. A gateway that restarts is waited for. Raises BatchFailed."""
        for attempt in range(_MOST_UNREACHABLE):
            try:
                return await self._ask("GET", f"/v1/batches/{batch_id}")
            except (aiohttp.ClientError, TimeoutError) as error:
                if attempt == _MOST_UNREACHABLE - 1:
                    raise BatchFailed(f"{self._url} is unreachable: {error}; the batch is {batch_id}") from None
                await asyncio.sleep(_RETRY_SECONDS)
        raise AssertionError("the loop returns or raises")

    async def cancel(self, batch_id: str) -> None:
        with suppress(BatchFailed, aiohttp.ClientError, TimeoutError):
            await self._ask("POST", f"/v1/batches/{batch_id}/cancel")

    async def download(self, file_id: str, target: Path) -> None:
        """Write a file's content. Raises BatchFailed."""
        try:
            async with self._session.get(f"{self._url}/v1/files/{file_id}/content") as answer:
                if answer.status != 200:
                    raise BatchFailed(f"{self._url}: the download of {file_id} returned {answer.status}")
                with await self._threads.run(open, target, "wb") as out:
                    async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                        await self._threads.run(out.write, chunk)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BatchFailed(f"{self._url}: the download of {file_id} failed: {error}") from None


class ProgressBar:
    """Lines, tokens per second and the time left, on standard error."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID = self._progress.add_task("uploading", total=None, speed="")
        self._since: tuple[float, int] | None = None  # when lines began to run, and the tokens of then

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, batch: dict[str, Any], now: float) -> None:
        counts, tokens = batch["request_counts"], batch["usage"]["total_tokens"]
        done = counts["completed"] + counts["failed"]
        speed = ""
        if done and self._since is None:
            self._since = now, tokens
        elif self._since is not None and now > self._since[0]:
            speed = f"{(tokens - self._since[1]) / (now - self._since[0]):,.0f} tokens/s"
        if counts["failed"]:
            speed += f", {counts['failed']} failed"
        state = f"paused: {batch['paused']}" if batch.get("paused") else batch["status"].replace("_", " ")
        self._progress.update(
            self._task, description=state, completed=done, total=counts["total"] or None, speed=speed.lstrip(", ")
        )


async def run_at(task: BatchTask, url: str, api_key: str) -> bool:
    """Run the task at a running gateway. True = every request was answered. Raises BatchFailed."""
    async with BatchClient.connected(url, api_key) as client:
        batch_id = await client.submit(task)
        console = Console(stderr=True)
        try:
            batch = await watch(client, batch_id, console)
        except asyncio.CancelledError:
            console.print(f"the batch goes on: {batch_id}; to cancel it: gateway batch cancel {batch_id} --url {url}")
            raise
        return await take_results(client, batch, task)


async def watch(client: BatchClient, batch_id: str, console: Console) -> dict[str, Any]:
    """The batch once it has ended; a progress bar is shown until then."""
    clock = asyncio.get_running_loop().time
    with ProgressBar(console) as bar:
        while (batch := await client.batch(batch_id))["status"] in _RUNNING:
            bar.show(batch, clock())
            await asyncio.sleep(_POLL_SECONDS)
        bar.show(batch, clock())
    return batch


async def take_results(client: BatchClient, batch: dict[str, Any], task: BatchTask) -> bool:
    """Write the answers and report the outcome of the batch. True = every request was answered. Raises BatchFailed."""
    if batch["status"] == "failed":
        found = batch["errors"]["data"]
        places = [f"line {each['line']}: {each['message']}" if each["line"] else each["message"] for each in found]
        more = [f"and {len(places) - _MOST_ERRORS} more"] if len(places) > _MOST_ERRORS else []
        raise BatchFailed("\n".join([f"{task.file} is invalid:", *places[:_MOST_ERRORS], *more]))
    for file_id, target in ((batch["output_file_id"], task.output), (batch["error_file_id"], task.errors)):
        if file_id is not None:
            await client.download(file_id, target)
        elif target == task.output:
            target.write_bytes(b"")
    counts, usage = batch["request_counts"], batch["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    sys.stderr.write(
        f"{batch['status']}: {counts['completed']} of {counts['total']} requests answered in {task.output}"
        + (f", {counts['failed']} errors in {task.errors}" if counts["failed"] else "")
        + f"; {usage['input_tokens']} input tokens ({cached} cached), {usage['output_tokens']} output tokens\n"
    )
    return bool(batch["status"] == "completed" and not counts["failed"])
