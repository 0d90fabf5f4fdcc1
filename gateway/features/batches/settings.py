"""The configuration of files and offline batches."""

import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, model_validator

from gateway.settings import Count, Seconds, Secret, Section, check_installed, default

_MONTH_SECONDS = 30.0 * 86400
_S3 = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?")


def _checked_path(path: str) -> str:
    if not path.strip() or "\0" in path:
        raise ValueError("must be the path of a folder, or s3://bucket/prefix; null = no batches")
    if path.startswith(_S3):
        if _BUCKET.fullmatch(path.removeprefix(_S3)) is None:
            raise ValueError("must look like s3://bucket/prefix")
        check_installed("obstore", "batches-s3")
    return path


def _is_url(url: str, *schemes: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and url.isprintable() and parts.port != 0
    except ValueError:
        return False


def _checked_endpoint(url: str) -> str:
    if not _is_url(url, "http", "https") or not urlsplit(url).hostname or "@" in url:
        raise ValueError("must look like https://host:9000")
    return url


def _checked_database(url: str) -> str:
    """The URL. Its text is not in the errors: it has a password."""
    if not _is_url(url, "postgresql", "postgres"):
        raise ValueError("must look like postgresql://user:password@host:5432/name")
    check_installed("psycopg_pool", "batches-postgres")
    return url


Place = Annotated[str, AfterValidator(_checked_path)]
Endpoint = Annotated[str, AfterValidator(_checked_endpoint)]
Database = Annotated[Secret, AfterValidator(_checked_database)]


class BatchesConfig(Section):
    """Files and offline batches (`/v1/files`, `/v1/batches`)."""

    path: Place | None = default(
        None,
        "Folder of files and batches, for one gateway alone; or `s3://bucket/prefix`, which several share with"
        " `database`; null = no batches.",
    )
    database: Database | None = default(
        None,
        "PostgreSQL of several gateways that share batches (`postgresql://user:password@host/name`); null = none.",
    )
    s3_endpoint: Endpoint | None = default(
        None, "URL of a server with the API of S3; null = `AWS_ENDPOINT_URL` of the environment, or AWS."
    )
    s3_region: str | None = default(None, "Region of the bucket; null = `AWS_REGION` of the environment, or us-east-1.")
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

    @model_validator(mode="after")
    def _is_for_one_gateway_or_for_several(self) -> Self:
        is_in_s3 = self.path is not None and self.path.startswith(_S3)
        if self.database is not None and not is_in_s3:
            raise ValueError(
                "several gateways that share batches need S3: set path to s3://bucket/prefix, or leave out database,"
                " which a gateway alone does not need"
            )
        if is_in_s3 and self.database is None:
            raise ValueError("a path in S3 needs database: the PostgreSQL that has the rows")
        return self

    @property
    def lifetime_seconds(self) -> int:
        """The lifetime of files in the whole seconds of the API."""
        return max(1, int(self.expire_after_seconds))
