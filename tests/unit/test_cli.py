import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner, Result

from gateway import __version__
from gateway.cli import app
from gateway.config import Config, load

EXAMPLES = Path(__file__).parents[2] / "config"


def gateway(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def answering() -> Iterator[str]:
    """A server that answers 200 at /livez and 503 elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/livez" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def closed_url() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"


def gateway_examples() -> list[Path]:
    """Those of config/ that are not other programs' files."""
    others = {"compose.yaml", "prometheus.yaml"}
    return [file for file in sorted(EXAMPLES.glob("*.yaml")) if file.name not in others]


@pytest.mark.parametrize("file", gateway_examples(), ids=lambda file: file.name)
def test_every_example_configuration_is_valid(file: Path) -> None:
    assert load(file, []).backends


def test_the_full_example_names_every_key_with_its_default() -> None:
    document = yaml.safe_load((EXAMPLES / "gateway.yaml").read_text())
    config = load(EXAMPLES / "gateway.yaml", [])
    assert set(document) == set(Config.model_fields)
    assert set(document["backends"][0]) == set(type(config.backends[0]).model_fields)
    for name, field in Config.model_fields.items():
        if name in ("backends", "models"):
            continue
        assert isinstance(field.default, BaseModel)
        assert set(document[name]) == set(type(field.default).model_fields), name
        assert getattr(config, name) == field.default


def test_the_version_is_shown() -> None:
    assert gateway("--version").output.strip() == __version__


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; import gateway.cli; "
        "print([name for name in ('aiohttp', 'pydantic', 'uvloop', 'yaml', 'orjson') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("command", [["serve"], ["check"], ["config", "print"]])
def test_a_missing_backend_is_one_line_and_2(command: list[str]) -> None:
    result = gateway(*command)
    assert result.exit_code == 2
    assert result.stderr.startswith("gateway: no backends")
    assert len(result.stderr.splitlines()) == 1


def test_each_mistake_in_a_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("backends: [{url: 'ftp://x'}, {url: 'http://h:1'}]\nserver: {prot: 1}\n")
    result = gateway("serve", "-c", str(file))
    assert result.exit_code == 2
    assert [line.split(":")[1].strip() for line in result.stderr.splitlines()] == ["server.prot", "backends.0.url"]


@pytest.mark.parametrize("content", [None, "backends: [", "- 1"])
def test_a_file_that_cannot_be_used_gives_2_and_no_traceback(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "some.yaml"
    if content is not None:
        file.write_text(content)
    result = gateway("check", "-c", str(file))
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    assert all(line.startswith("gateway: ") for line in result.stderr.splitlines())


def test_check_exits_with_1_when_no_backend_can_be_reached() -> None:
    result = gateway("check", "--backend", closed_url(), "--json")
    assert result.exit_code == 1
    assert result.stderr == "gateway: no backend can be reached\n"
    [report] = json.loads(result.stdout)["backends"]
    assert report["reachable"] is False
    assert report["routing_because"] == "connection refused"


def test_the_schema_describes_every_section() -> None:
    schema = json.loads(gateway("config", "schema").stdout)
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False


def test_the_printed_configuration_masks_secrets_and_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "backends: [{url: 'http://h:1', api_key: sk-backend}, {url: 'http://h:2'}]\n"
        "auth: {keys: [{name: a, key: sk-client}, {name: b, key_sha256: " + "ab" * 32 + "}]}\n"
    )
    result = gateway("config", "print", "-c", str(file), "--port", "9")
    assert result.exit_code == 0
    for secret in ("sk-backend", "sk-client", "abab"):
        assert secret not in result.output
    document = yaml.safe_load(result.stdout)
    assert document["server"]["port"] == 9
    assert [backend["api_key"] for backend in document["backends"]] == ["***", ""]
    assert set(document) == set(Config.model_fields)


def test_healthcheck_is_0_only_for_200(answering: str) -> None:
    assert gateway("healthcheck", "--url", f"{answering}/livez").exit_code == 0
    assert gateway("healthcheck", "--url", f"{answering}/readyz").exit_code == 1
    assert gateway("healthcheck", "--url", closed_url()).exit_code == 1
    assert gateway("healthcheck", "--url", "nonsense").exit_code == 1


def test_healthcheck_ignores_proxies(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", closed_url())
    assert gateway("healthcheck", "--url", f"{answering}/livez").exit_code == 0


@pytest.mark.parametrize("arguments", [["nonsense"], ["serve", "--port", "70000"], ["demo", "--engine", "other"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert gateway(*arguments).exit_code == 2
