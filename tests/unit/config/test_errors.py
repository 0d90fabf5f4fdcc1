"""Errors in a configuration file: one plain line for each mistake."""

import pytest

from gateway.config import ConfigError
from gateway.config.file import parse


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        ({}, ["configuration: no backends: pass --backend http://host:8000 (repeatable) or list them in a file"]),
        ({"backends": [{"url": "http://a:1"}], "servr": {}}, ["servr: unknown key; did you mean server?"]),
        ({"backends": [{"url": "http://a:1", "max_in_flight": "many"}]},
         ["backends.0.max_in_flight: must be a whole number, or auto"]),
        ({"backends": ["http://a:1"]}, ["backends.0: must be a mapping with a url, such as {url: http://10.0.0.11:8000}"]),
        ({"backends": [{"url": "http://a:1"}], "embeddings": {"max_batch_items": 0}},
         ["embeddings.max_batch_items: must be more than 0"]),
    ],
)  # fmt: skip
def test_each_error_names_its_key(document: object, lines: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(document)
    assert str(caught.value).splitlines() == lines


NEEDS_S3 = (
    "batches: several gateways that share batches need S3: set path to s3://bucket/prefix, or leave out database,"
    " which a gateway alone does not need"
)


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        ({"database": "postgresql://u:pass@h/d"}, NEEDS_S3),
        ({"path": "/mnt/shared", "database": "postgresql://u:pass@h/d"}, NEEDS_S3),
        ({"path": "/b", "database": "mysql://u:pass@h/d"},
         "batches.database: must look like postgresql://user:password@host:5432/name"),
        ({"path": "/b", "database": "postgresql://u:pass@h:0/d"},
         "batches.database: must look like postgresql://user:password@host:5432/name"),
        ({"path": "/b", "database": "postgresql://u:pass@[h/d"},
         "batches.database: must look like postgresql://user:password@host:5432/name"),
        ({"path": "s3://bucket/prefix"}, "batches: a path in S3 needs database: the PostgreSQL that has the rows"),
        ({"path": "s3://key:pass@bucket", "database": "postgresql://h/d"},
         "batches.path: must look like s3://bucket/prefix"),
        ({"path": "s3://bucket", "database": "postgresql://h/d", "s3_endpoint": "key:pass@host:9000"},
         "batches.s3_endpoint: must look like https://host:9000"),
    ],
)  # fmt: skip
def test_what_gateways_share_is_refused_without_its_password(batches: dict[str, str], line: str) -> None:
    for needed in ("psycopg_pool", "obstore"):
        pytest.importorskip(needed)
    with pytest.raises(ConfigError) as caught:
        parse({"backends": [{"url": "http://a:1"}], "batches": batches})
    assert str(caught.value).splitlines() == [line]
