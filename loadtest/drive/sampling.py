"""Everything that is watched beside the load: GPUs and metrics pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from loadtest.drive.gpus import GpuSampler
from loadtest.drive.pages import PageSampler
from loadtest.report.schema import Samples


class Sampling:
    """Watches inside the block; nothing of it runs afterwards."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._gpus = GpuSampler(time.monotonic)
        self._pages = PageSampler(pages, time.monotonic)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._gpus)
        self._stack.enter_context(self._pages)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def samples(self, origin: float) -> Samples:
        """What was seen, in seconds from `origin` on the monotonic clock; call it after the block."""
        return Samples(gpus=self._gpus.series(origin), no_gpu=self._gpus.missing, pages=self._pages.series(origin))
