"""While batches are off, nothing of them is imported but their settings."""

import subprocess
import sys

CODE = """
import asyncio
import sys
import gateway.__main__
import gateway.process
from gateway.app import Gateway
from gateway.config.file import parse

async def build():
    Gateway(parse({"backends": [{"url": "http://127.0.0.1:1"}]}), None)

asyncio.run(build())
settings = "gateway.features.batches", "gateway.features.batches.settings"
found = [name for name in sys.modules if name.startswith("gateway.features.batches") and name not in settings]
assert "sqlite3" not in sys.modules
assert not found, found
"""


def test_a_gateway_without_batches_imports_nothing_of_them() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
