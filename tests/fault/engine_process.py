"""Simulated engines in processes of their own, which can be killed and started again at the same port."""

import asyncio
import os
import sys
from types import TracebackType
from typing import Self

MODEL = "sim"


class EngineProcess:
    """`async with EngineProcess() as engine:` serves at `engine.url`."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start, or start again."""
        arguments = ["-m", "loadtest", "sim", "--model", MODEL, "--port", str(self.port), *self._flags]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
        )
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        self.port = int(line.rsplit(":", 1)[1].split("/")[0].split()[0])

    async def kill(self) -> None:
        """End it without notice."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
