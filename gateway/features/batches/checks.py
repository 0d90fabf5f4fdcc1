"""Checks input files, one at a time: their lines, the model, and how many lines a key may have enqueued."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO

from gateway.config import Config
from gateway.core.threads import breather
from gateway.features.batches.batch import Batch, batch_error
from gateway.features.batches.contents import Contents
from gateway.features.batches.input import CheckedInput, InputLimits, InvalidInput, check_input

MISSING = "input_file_missing"


class InputChecks:
    """Checks the input files of batches. A large one takes tenths of a second in a thread."""

    def __init__(self, contents: Contents, engines_of: Callable[[str], int | None]) -> None:
        """`engines_of`: how many engines serve a model of this name; None = there is no such model."""
        self._contents = contents
        self._engines_of = engines_of
        self._checking = asyncio.Lock()

    def apply(self, config: Config) -> None:
        """Take over limits, for files that are checked from now on."""
        self._limits = InputLimits.of(config.batches, config.server)
        self._most_enqueued = config.batches.max_enqueued_lines_per_key

    async def open(self, batch: Batch) -> BinaryIO:
        """Open the input file. Raises InvalidInput if it has been deleted, and what its contents raise."""
        try:
            return await self._contents.local(batch.input_file_id)
        except FileNotFoundError:
            raise InvalidInput([batch_error(MISSING, "The input file has been deleted.")]) from None

    async def check(self, batch: Batch, source: BinaryIO, enqueued: Callable[[], int] | None) -> CheckedInput:
        """Check the input file. Raises InvalidInput.

        `enqueued`: counts the lines of the key's other batches; None = the file was accepted before, within the limits
        of then.
        """
        breathe, limits = breather(), self._limits
        if enqueued is None:
            limits = replace(limits, max_lines=max(limits.max_lines, batch.total), max_embedding_inputs=sys.maxsize)
        async with self._checking:
            checked = await self._contents.threads.run(
                check_input, source, batch.endpoint, limits=limits, breathe=breathe
            )
        if enqueued is not None:
            self._admit(checked, enqueued())
        return checked

    def _admit(self, checked: CheckedInput, enqueued: int) -> None:
        if self._engines_of(checked.model) is None:
            message = f"The model {checked.model[:200]!r} does not exist. GET /v1/models lists the available models."
            raise InvalidInput([batch_error("model_not_found", message, 1, "body.model")])
        if enqueued + len(checked.index) > self._most_enqueued:
            message = (
                f"The running batches of this API key have {enqueued} requests, and this one has {len(checked.index)}"
                f" more; the limit is {self._most_enqueued} (batches.max_enqueued_lines_per_key). Retry when others"
                " have ended."
            )
            raise InvalidInput([batch_error("enqueued_request_limit_exceeded", message)])
