"""The configuration of files and offline batches."""

from typing import Annotated

from pydantic import AfterValidator

from gateway.config.values import Count, Seconds, Section, default

_MONTH_SECONDS = 30.0 * 86400


def _checked_folder(path: str) -> str:
    if not path.strip() or "\0" in path:
        raise ValueError("must be the path of a folder; null = no batches")
    return path


Folder = Annotated[str, AfterValidator(_checked_folder)]


class BatchesConfig(Section):
    """Files and offline batches (`/v1/files`, `/v1/batches`)."""

    path: Folder | None = default(None, "Folder of files and batches, for one gateway alone; null = no batches.")
    max_file_bytes: Count = default(209715200, "Maximum size of an uploaded file; larger ones get 413.")
    max_bytes_per_key: Count = default(
        10737418240, "Maximum size of all files of an API key; uploads beyond it get 413. Results are always kept."
    )
    max_lines: Count = default(50000, "Maximum requests in one input file; else the batch fails.")
    max_embedding_inputs: Count = default(50000, "Maximum inputs in all embeddings requests of one input file.")
    max_enqueued_lines_per_key: Count = default(
        1000000, "Maximum requests in all running batches of an API key; beyond it, a new batch fails."
    )
    lines_in_flight: Count = default(1024, "Maximum requests of all batches that run or wait at the same time.")
    idle_only: bool = default(
        True,
        "Whether batches use idle capacity only, while their windows leave time for that; false = the class batch.",
    )
    expire_after_seconds: Seconds = default(
        _MONTH_SECONDS, "Lifetime of files for which the client sets none; ended batches are listed as long."
    )

    @property
    def lifetime_seconds(self) -> int:
        """The lifetime of files in the whole seconds of the API."""
        return max(1, int(self.expire_after_seconds))
