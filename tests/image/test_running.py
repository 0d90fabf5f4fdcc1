"""A gateway that serves from a container, in front of a simulated engine outside of it."""

import urllib.request
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from loadtest.servers.processes import free_ports
from tests.image.conftest import MODEL, Served, serving, write_config
from tests.image.container import WAIT_SECONDS, Runtime

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count to ten, please."}]


def sdk(served: Served) -> OpenAI:
    """OpenAI's SDK pointed at the gateway."""
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=WAIT_SECONDS)


def test_it_lives(served: Served) -> None:
    with urllib.request.urlopen(f"{served.url}/livez", timeout=WAIT_SECONDS) as answer:
        assert answer.status == 200


def test_it_answers_a_chat_completion(served: Served) -> None:
    with sdk(served) as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_it_offers_metrics_on_the_admin_port(served: Served) -> None:
    with urllib.request.urlopen(f"{served.admin_url}/metrics", timeout=WAIT_SECONDS) as answer:
        assert b"gateway_backend_up{" in answer.read()


def test_the_declared_health_check_passes_while_it_serves(served: Served, containers: Runtime) -> None:
    kind, *command = containers.image.config["Healthcheck"]["Test"]
    done = served.container.execute([*command, "--url", f"{served.url}/livez"])
    assert (kind, done.returncode) == ("CMD", 0), done.stderr


def test_the_declared_health_check_fails_where_nothing_serves(served: Served, containers: Runtime) -> None:
    (port,) = free_ports(1)
    _, *command = containers.image.config["Healthcheck"]["Test"]
    done = served.container.execute([*command, "--url", f"http://127.0.0.1:{port}/livez"])
    assert done.returncode == 1
    assert "refused" in done.stderr


def test_check_finds_the_backend(containers: Runtime, engine_url: str, tmp_path: Path) -> None:
    write_config(tmp_path, engine_url)
    done = containers.run(["gateway", "check", "-c", "/etc/gateway/gateway.yaml"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert MODEL in done.stdout


def test_check_fails_when_no_backend_answers(containers: Runtime, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    write_config(tmp_path, f"http://127.0.0.1:{port}")
    done = containers.run(["gateway", "check", "-c", "/etc/gateway/gateway.yaml"], tmp_path)
    assert done.returncode == 1
    assert "no backend is reachable" in done.stderr


def test_without_a_configuration_it_says_so_and_ends(containers: Runtime) -> None:
    config = containers.image.config
    done = containers.run([*config["Entrypoint"], *config["Cmd"]])
    assert done.returncode == 2
    assert "/etc/gateway/gateway.yaml" in done.stderr


def test_sigterm_lets_a_running_answer_end_and_stops_it(containers: Runtime, engine_url: str, tmp_path: Path) -> None:
    with serving(containers, tmp_path, engine_url) as served, sdk(served) as client:
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=64, stream=True)
        chunks = [next(stream)]
        served.container.kill(containers.image.config["StopSignal"])
        chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length"
        assert served.container.process.wait(WAIT_SECONDS) == 0
