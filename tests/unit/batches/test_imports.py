"""While batches are off, nothing of them is imported."""

import subprocess
import sys

CODE = """
import sys
import gateway.__main__
import gateway.app
import gateway.process
found = [name for name in sys.modules if name.startswith("gateway.batches") or name == "sqlite3"]
assert not found, found
"""


def test_a_gateway_without_batches_imports_nothing_of_them() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
