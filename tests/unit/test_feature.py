"""A feature is one folder and one entry in the table: nothing else changes. docs/adding-a-feature.md shows this one."""

import re
import subprocess
import sys
from pathlib import Path

from gateway.app import Gateway
from gateway.config.file import parse
from gateway.features.table import FEATURES, FeatureEntry
from tests.clients import Answer, Client, request

ROOT = Path(__file__).resolve().parents[2]
GREETINGS = FeatureEntry(
    "greetings",
    "tests.unit.greetings.feature:Greetings",
    lambda config: config.models.aliases != {},
    off_paths={b"/v1/greeting": "greetings are off; set models.aliases."},
)
SETTINGS = {
    "server": {"host": "127.0.0.1", "port": 0, "admin": {"port": 0, "allowed_hosts": ["gateway"]}},
    "backends": [{"url": "http://127.0.0.1:1"}],
    "auth": {"keys": [{"name": "ann", "key": "sk-ann"}]},
}
KEY = (b"authorization: Bearer sk-ann",)


async def ask(port: int, target: bytes, method: bytes = b"GET", headers: tuple[bytes, ...] = KEY) -> Answer:
    async with await Client.connect(port) as client:
        await client.send(request(b"", *headers, method=method, target=target))
        return await client.answer()


async def test_it_answers_counts_and_shows_a_gauge() -> None:
    config = parse({**SETTINGS, "models": {"aliases": {"gpt": "m"}}})
    gateway = Gateway(config, None, features=(*FEATURES, GREETINGS))
    async with gateway.running() as admin_port:
        assert admin_port is not None
        port = gateway.server.port
        first, second = await ask(port, b"/v1/greeting/you"), await ask(port, b"/v1/greeting/you")
        assert (first.json, second.json["ended"]) == ({"greeting": "Hello, you.", "key": "ann", "ended": 0}, 1)
        assert (await ask(port, b"/v1/greeting/you", headers=())).status == 401  # keys are asked for, as everywhere
        wrong = await ask(port, b"/v1/greeting/you", b"DELETE")
        assert (wrong.status, wrong.header("allow")) == (405, "GET")
        metrics = await ask(admin_port, b"/metrics", headers=())
        assert b"\ngateway_ended_requests 4" in metrics.body


async def test_while_it_is_off_its_paths_say_so() -> None:
    gateway = Gateway(parse(SETTINGS), None, features=(*FEATURES, GREETINGS))
    assert "greetings" not in gateway.features
    async with gateway.running():
        answer = await ask(gateway.server.port, b"/v1/greeting/you")
        assert answer.status == 404
        assert answer.error["message"].endswith("greetings are off; set models.aliases.")


async def test_a_reload_switches_it_on() -> None:
    gateway = Gateway(parse(SETTINGS), None, features=(*FEATURES, GREETINGS))
    async with gateway.running():
        await gateway.reload(parse({**SETTINGS, "models": {"aliases": {"gpt": "m"}}}))
        answer = await ask(gateway.server.port, b"/v1/greeting/you")
        assert answer.json == {"greeting": "Hello, you.", "key": "ann", "ended": 0}


OFF = [each.name for each in FEATURES if not each.is_on(parse(SETTINGS))]
FACES = {"settings", "several_addresses"}  # of a feature that is off: what the configuration and its check need
PROGRAM = """
import asyncio, sys
import gateway.__main__, gateway.process
from gateway.app import Gateway
from gateway.config.file import parse
from gateway.features.table import FEATURES
from tests.unit.test_feature import FACES, GREETINGS, OFF, SETTINGS

async def build():
    Gateway(parse(SETTINGS), None, features=[*FEATURES, GREETINGS])

asyncio.run(build())
rooms = tuple(f"gateway.features.{name}." for name in OFF)
found = [name for name in sys.modules if name.startswith(rooms) and name.rpartition(".")[2] not in FACES]
assert not found, found
assert "tests.unit.greetings.feature" not in sys.modules
assert not {"sqlite3", "opentelemetry", "redis", "dns", "kubernetes_asyncio"} & sys.modules.keys()
"""


def test_of_a_feature_that_is_off_nothing_is_imported() -> None:
    assert OFF == ["tracing", "discovery", "coordination", "batches"]
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True)


def test_the_page_shows_this_feature() -> None:
    page = (ROOT / "docs/adding-a-feature.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown[0] == (ROOT / "tests/unit/greetings/feature.py").read_text()
