"""The admin port under a foreign name, and dry runs of bodies that no client could send either."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.fault.rig import running
from tests.scripted import ScriptedBackend

MEBIBYTE = 1048576


@asynccontextmanager
async def admin(backend: ScriptedBackend) -> AsyncIterator[Any]:
    """A session whose paths are those of the admin port."""
    sections = {
        "server": {"admin": {"port": 0, "allowed_hosts": ["gateway"]}, "max_json_values": 262_144},
        "prefix_report": {"show_text": True},
    }
    async with running(backend, sections=sections) as under_test:
        base = f"http://127.0.0.1:{under_test.admin_port}"
        async with aiohttp.ClientSession(base) as session:
            yield session


@pytest.mark.parametrize("path", ["/metrics", "/admin/backends", "/admin/queue", "/admin/prefixes"])
async def test_no_page_reads_the_admin_port_under_its_own_name(path: str, backend: ScriptedBackend) -> None:
    async with admin(backend) as session:
        for host, status in (("evil.example", 403), ("evil.example:80", 403), ("gateway:8081", 200), ("[::1]", 200)):
            async with session.get(path, headers={"host": host}) as answer:
                assert answer.status == status, host


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b" " * (MEBIBYTE + 1), 413),
        (b'{"messages":' + b"[" * 500_000 + b"]" * 500_000 + b"}", 400),
        (b'{"prompt":[' + b"{}," * 300_000 + b"{}]}", 400),
        (b'{"model":"scripted","prompt":["",' + b"1," * 510_000 + b"1]}", 400),
        (b'{"prompt":"' + b"a" * 1000, 400),
    ],
    ids=["large", "deep", "objects", "numbers", "cut"],
)
@pytest.mark.parametrize("path", ["", "?path=/v1/completions"])
async def test_a_dry_run_has_the_limits_of_a_request_and_a_size_of_its_own(
    body: bytes, status: int, path: str, backend: ScriptedBackend
) -> None:
    async with admin(backend) as session, session.post(f"/admin/route{path}", data=io.BytesIO(body)) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["type"] == "invalid_request_error"
