import errno
import json
import platform
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner, Result

from gateway import BUILD, __version__
from gateway.__main__ import app
from gateway.cli.client import livez_url
from gateway.cli.serving import is_open_to_all, why_not_serving
from gateway.config import Config
from gateway.config.file import load, parse
from tests.certificates import certificate
from tests.unit import pages as web

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "config/gateway.yaml"


def gateway(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@contextmanager
def serving(pages: dict[str, str], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server that has these pages, and answers 503 elsewhere."""
    with web.serving(lambda path: (200, pages[path].encode()) if path in pages else (503, b""), tls) as url:
        yield url


@pytest.fixture
def answering() -> Iterator[str]:
    """A server that answers 200 at /livez and 503 elsewhere."""
    with serving({"/livez": ""}) as url:
        yield url


@pytest.fixture
def well() -> Iterator[str]:
    """A backend that there is nothing to say against."""
    metrics = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
    with serving({"/health": "", "/v1/models": '{"data": [{"id": "m"}]}', "/metrics": metrics}) as url:
        yield url


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What `gateway serve` would have served."""
    configs: list[Config] = []
    monkeypatch.setattr("gateway.process.serve", lambda config, load, file: configs.append(config))  # noqa: ARG005
    return configs


def closed_url() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"


def gateway_examples() -> list[Path]:
    """The full example, and the gateways of the compose files."""
    return [EXAMPLE, *sorted((ROOT / "deploy/compose").glob("gateway*.yaml"))]


@pytest.mark.parametrize("file", gateway_examples(), ids=lambda file: str(file.relative_to(ROOT)))
def test_every_example_configuration_is_valid(file: Path) -> None:
    assert load(file, []).backends


def test_the_full_example_names_every_key_with_its_default() -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    config = load(EXAMPLE, [])
    assert set(document) == set(Config.model_fields)
    fields = type(config.backends[0]).model_fields
    assert set(document["backends"][0]) == set(fields)
    for name, field in Config.model_fields.items():
        if name in ("backends", "models"):
            continue
        assert isinstance(field.default, BaseModel)
        assert set(document[name]) == set(type(field.default).model_fields), name
        assert getattr(config, name) == field.default


def test_the_version_is_shown() -> None:
    python = platform.python_version()
    assert gateway("--version").output.strip() == f"vllm-batching-gateway {__version__} ({BUILD}, Python {python})"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_commands(shell: str) -> None:
    line = {"_GATEWAY_COMPLETE": f"complete_{shell}", "COMP_WORDS": "gateway he", "COMP_CWORD": "1"}
    typed = {"_TYPER_COMPLETE_ARGS": "gateway he", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = CliRunner().invoke(app, [], env=line | typed, prog_name="gateway")
    assert "healthcheck" in done.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; import gateway.__main__; "
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
    shown = [line.split(": ")[1:3] for line in result.stderr.splitlines()]
    assert shown == [[f"{file}:2", "server.prot"], [f"{file}:1", "backends.0.url"]]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("backends: [http://a:1]", "backends.0: must be a mapping with a url, such as {url: http://10.0.0.11:8000}"),
        ("backends: http://a:1", "backends: must be a list"),
        ("backends: [{name: a}]", "backends.0.url: is missing"),
        (
            "backends: [{url: 'http://a:1', max_in_flight: x}]",
            "backends.0.max_in_flight: must be a whole number, or auto",
        ),
        ("backends: [{url: 'http://a:1'}]\nserver: 5", "server: must be a mapping"),
        ("backends: [{url: 'http://a:1'}]\nmodels: {aliases: [a]}", "models.aliases: must be a mapping"),
    ],
)
def test_a_wrong_shape_is_reported_in_the_words_of_the_file(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(content)
    result = gateway("serve", "-c", str(file))
    assert result.exit_code == 2
    line = len(content.splitlines())
    assert result.stderr == f"gateway: {file}:{line}: {complaint}\n"


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "nowhere.yaml"
    assert gateway("serve", "-c", str(file)).stderr == f"gateway: {file}: No such file or directory\n"


def test_the_admin_port_can_be_moved_and_turned_off(tmp_path: Path, served: list[Config]) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: [{url: 'http://h:1'}]\nserver: {admin: {host: 10.0.0.1, port: 1}}\n")
    for options in ([], ["--admin-port", "0"], ["--no-admin"]):
        assert gateway("serve", "-c", str(file), *options).exit_code == 0
    assert [config.server.admin and config.server.admin.model_dump(include={"host", "port"}) for config in served] == [
        {"host": "10.0.0.1", "port": 1},
        {"host": "10.0.0.1", "port": 0},
        None,
    ]


def test_an_admin_port_that_the_file_turned_off_is_turned_on_for_this_machine(
    tmp_path: Path, served: list[Config]
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: [{url: 'http://h:1'}]\nserver: {admin: null}\n")
    assert gateway("serve", "-c", str(file), "--admin-port", "9").exit_code == 0
    assert served[0].server.admin is not None
    assert served[0].server.admin.model_dump(include={"host", "port"}) == {"host": "127.0.0.1", "port": 9}


def test_a_gateway_without_keys_that_others_can_reach_is_warned_of(served: list[Config]) -> None:
    result = gateway("serve", "--backend", "http://h:1")
    assert result.stderr.startswith("gateway: warning: auth.keys is empty and server.host is 0.0.0.0")
    assert len(result.stderr.splitlines()) == 1
    assert gateway("serve", "--backend", "http://h:1", "--host", "127.0.0.1").stderr == ""
    assert len(served) == 2


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("0.0.0.0", True), ("", True), ("10.0.0.1", True), ("::", True), ("example.org", True),
     ("127.0.0.1", False), ("127.8.8.8", False), ("::1", False), ("localhost", False)],
)  # fmt: skip
def test_only_loopback_is_closed_to_others(host: str, is_open: bool) -> None:
    config = parse({"backends": [{"url": "http://h:1"}], "server": {"host": host}})
    assert is_open_to_all(config) is is_open
    with_key = {"keys": [{"name": "a", "key": "k"}]}
    assert not is_open_to_all(parse({"backends": [{"url": "http://h:1"}], "server": {"host": host}, "auth": with_key}))


@pytest.mark.parametrize(
    ("taken_option", "other_option", "key"),
    [("--port", "--admin-port", "server.port"), ("--admin-port", "--port", "server.admin.port")],
)
def test_the_error_for_a_port_in_use_names_its_setting(taken_option: str, other_option: str, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "gateway", "serve", "--backend", closed_url(), "--host", "127.0.0.1"]
        command += [taken_option, str(port), other_option, "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"gateway: cannot listen on 127.0.0.1 port {port}: Address already in use: change {key} ({taken_option} N)"
    )


def bind_error(number: int, host: str, port: int) -> OSError:
    return OSError(number, f"error while attempting to bind on address ('{host}', {port}): it says why")


def test_other_errors_of_listening_name_their_setting() -> None:
    server = {"host": "10.9.9.9", "port": 80, "admin": {"host": "127.0.0.1", "port": 81}}
    config = parse({"backends": [{"url": "http://h:1"}], "server": server})
    privileged = why_not_serving(bind_error(errno.EACCES, "10.9.9.9", 80), config)
    assert privileged.endswith("port 80: Permission denied: change server.port (--port N)")
    not_ours = why_not_serving(bind_error(errno.EADDRNOTAVAIL, "10.9.9.9", 80), config)
    assert not_ours.endswith("change server.host (--host ADDRESS)")
    unknown = why_not_serving(socket.gaierror(socket.EAI_NONAME, "Name or service not known"), config)
    assert "check server.host (10.9.9.9) and server.admin.host (127.0.0.1)" in unknown
    assert why_not_serving(OSError(errno.EMFILE, "Too many open files"), config) == "cannot serve: Too many open files"


def test_two_listeners_at_one_port_are_both_named() -> None:
    server = {"host": "127.0.0.2", "port": 80, "admin": {"port": 80}}
    config = parse({"backends": [{"url": "http://h:1"}], "server": server})
    line = why_not_serving(bind_error(errno.EADDRINUSE, "0.0.0.0", 80), config)
    assert line.endswith("change server.port (--port N) or server.admin.port (--admin-port N)")


@pytest.mark.parametrize("content", [None, "backends: [", "- 1"])
def test_a_file_that_cannot_be_used_gives_2_and_no_traceback(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "some.yaml"
    if content is not None:
        file.write_text(content)
    result = gateway("check", "-c", str(file))
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    assert all(line.startswith("gateway: ") for line in result.stderr.splitlines())


def test_check_exits_with_1_when_what_answers_is_no_engine() -> None:
    with serving({"/health": ""}) as url:
        result = gateway("check", "--backend", url)
    assert (result.exit_code, result.stdout.count("no vLLM server")) == (1, 1)
    assert result.stderr == "gateway: no backend can be used\n"


def test_check_exits_with_1_when_no_backend_can_be_reached() -> None:
    result = gateway("check", "--backend", closed_url(), "--json")
    assert result.exit_code == 1
    assert result.stderr == "gateway: no backend is reachable\n"
    [report] = json.loads(result.stdout)["backends"]
    assert report["reachable"] is False
    assert report["routing_because"] == "connection refused"


def test_a_strict_check_exits_with_1_if_any_backend_is_not_as_it_should_be(
    tmp_path: Path, well: str, answering: str
) -> None:
    def check(*urls: str) -> Result:
        file = tmp_path / "gateway.yaml"
        backends = [{"url": url, "name": f"b{number}", "max_in_flight": 8} for number, url in enumerate(urls)]
        file.write_text(yaml.safe_dump({"backends": backends}))
        lenient = gateway("check", "-c", str(file), "--json")
        assert lenient.exit_code == 0
        return gateway("check", "-c", str(file), "--json", "--strict")

    assert check(well).exit_code == 0
    assert "8 sequences (max_in_flight)" in gateway("check", "-c", str(tmp_path / "gateway.yaml")).stdout
    for bad in (closed_url(), answering):  # one that cannot be reached, one with a warning
        result = check(well, bad)
        assert result.exit_code == 1
        assert result.stderr == "gateway: failed checks: b1\n"


def test_the_schema_describes_every_section() -> None:
    schema = json.loads(gateway("config", "schema").stdout)
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False


def test_the_printed_configuration_masks_secrets_and_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "backends: [{url: 'http://h:1', api_key: sk-backend}, {url: 'http://h:2'}]\n"
        "server: {admin: {token: sk-admin}}\n"
        "auth: {cache_salt_secret: sk-salts, keys: [{name: a, key: sk-client}, {name: b, key_sha256: "
        + "ab" * 32
        + "}]}\n"
    )
    result = gateway("config", "print", "-c", str(file), "--port", "9")
    assert result.exit_code == 0
    for secret in ("sk-backend", "sk-client", "sk-salts", "abab", "sk-admin"):
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


def test_healthcheck_follows_the_configured_port(answering: str, tmp_path: Path) -> None:
    file, port = tmp_path / "gateway.yaml", urlsplit(answering).port
    backends = "backends: [{url: 'http://h:1'}]\n"
    for host in ('"0.0.0.0"', '""', "127.0.0.1"):
        file.write_text(f"{backends}server: {{host: {host}, port: {port}}}\n")
        assert gateway("healthcheck", "-c", str(file)).exit_code == 0
    file.write_text(f"{backends}server: {{host: '::', port: 1}}\n")
    result = gateway("healthcheck", "-c", str(file))
    assert (result.exit_code, "http://[::1]:1/livez" in result.stderr) == (1, True)
    assert livez_url(tmp_path / "none.yaml") == "http://127.0.0.1:8080/livez"
    file.write_text("nonsense: 1\n")
    assert gateway("healthcheck", "-c", str(file)).exit_code == 1  # Docker gives 2 no meaning


def test_healthcheck_says_in_plain_words_what_failed() -> None:
    url = closed_url()
    assert gateway("healthcheck", "--url", url).stderr == f"gateway: {url}: connection refused\n"
    assert "host name not resolved" in gateway("healthcheck", "--url", "http://no-such-host.invalid:1").stderr


def test_healthcheck_follows_the_tls_of_the_client_port(tmp_path: Path) -> None:
    pem = certificate(tmp_path, name="DNS:gateway.example", days=1)
    file, sections = tmp_path / "gateway.yaml", {"backends": [{"url": "http://h:1"}]}
    tls = {"certificate": str(pem), "key": str(tmp_path / "key.pem")}
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem, tmp_path / "key.pem")
    with serving({"/livez": ""}, context) as url:  # under another name than its certificate's
        server = {"host": "127.0.0.1", "port": urlsplit(url).port, "tls": tls, "admin": None}
        file.write_text(yaml.safe_dump(sections | {"server": server}))
        assert gateway("healthcheck", "-c", str(file)).exit_code == 0
        assert ": TLS: " in gateway("healthcheck", "--url", f"{url}/livez").stderr
    for more, port in (
        ({"admin": {"port": 1}}, 1),
        ({"admin": {"port": 1}, "metrics": {"port": 2}}, 2),
        ({"admin": {"port": 1, "token": "t"}}, 1),
    ):
        file.write_text(yaml.safe_dump(sections | {"server": server | more}))
        assert livez_url(file) == f"http://127.0.0.1:{port}/livez"
    file.write_text(yaml.safe_dump(sections | {"server": server | {"admin": {"token": "t", "open_paths": []}}}))
    assert livez_url(file).startswith("https://")


def test_healthcheck_ignores_proxies(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", closed_url())
    assert gateway("healthcheck", "--url", f"{answering}/livez").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["serve", "--port", "70000"],
        ["serve", "--backend", "http://h:1", "--admin-port", "1", "--no-admin"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert gateway(*arguments).exit_code == 2


def test_a_backend_and_a_key_need_no_file() -> None:
    printed = yaml.safe_load(gateway("config", "print", "--backend", "h:1", "--api-key", "team=sk-1").output)
    assert (printed["backends"][0]["url"], printed["auth"]["keys"][0]["name"]) == ("http://h:1", "team")


def test_the_log_is_set_by_options_and_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: [{url: 'http://h:1'}]\nlog: {level: warning, format: json}\n")
    printed = yaml.safe_load(gateway("config", "print", "-c", str(file), "--log-format", "console").output)
    assert printed["log"] == {"level": "warning", "format": "console"}
    assert gateway("serve", "--backend", "h:1", "--log-level", "loud").exit_code == 2
