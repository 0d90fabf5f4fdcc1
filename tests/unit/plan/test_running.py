import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.features.plan.command import ask_running, running_document
from gateway.features.plan.model import PlanError
from tests.unit import pages
from tests.unit.plan.models import workload

MODELS = json.dumps({"data": [{"id": "lora", "parent": "m"}, {"id": "m", "max_model_len": 8192}]})


def metrics(engines: int = 1, tokens: str = "100000") -> str:
    lines = []
    for rank in range(engines):
        lines.append(f'vllm:num_requests_running{{engine="{rank}"}} 0.0')
        lines.append(f'vllm:num_requests_waiting{{engine="{rank}"}} 0.0')
        lines.append(
            f'vllm:cache_config_info{{engine="{rank}",block_size="32",num_gpu_blocks="3125",'
            f'kv_cache_size_tokens="{tokens}",enable_prefix_caching="True"}} 1.0'
        )
    return "\n".join(lines) + "\n"


def engine(**changed: str | None) -> dict[str, str]:
    answers = {"/health": "", "/version": '{"version": "0.33.0"}', "/v1/models": MODELS, "/metrics": metrics()}
    return {path: text for path, text in {**answers, **changed}.items() if text is not None}


@contextmanager
def serving(answers: dict[str, str], other: int = 404) -> Iterator[str]:
    """A server that has these pages."""
    with pages.serving(lambda path: (200, answers[path].encode()) if path in answers else (other, b"")) as url:
        yield url


def running(url: str) -> dict[str, Any]:
    return running_document(url, ask_running(url), workload(), None)


def refusal(answers: dict[str, str], other: int = 404) -> str:
    """Why there is no plan."""
    with serving(answers, other) as url, pytest.raises(PlanError) as refused:
        running(url)
    return str(refused.value)


def test_a_backend_reports_all_that_a_plan_needs() -> None:
    with serving(engine()) as url:
        found = running(url)
    backend = {"url": url, "engines": 1, "kv_cache_tokens": 100_000, "max_num_seqs": None}
    assert found["model"] == {"name": "m", "max_model_len": 8192, "version": "0.33.0"}
    assert (found["backend"], found["block_tokens"]) == (backend, 32)
    assert found["lengths"][-1]["sequences"] == 3125 // 256


def test_several_engines_have_a_cache_each() -> None:
    info = '{"vllm_config": {"scheduler_config": {"max_num_seqs": 64}}}'
    with serving(engine(**{"/metrics": metrics(2), "/server_info?config_format=json": info})) as url:
        found = running(url)
    assert found["backend"] == {"url": url, "engines": 2, "kv_cache_tokens": 100_000, "max_num_seqs": 64}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"/metrics": None}, "does not tell the size of its KV cache"),
        ({"/v1/models": '{"data": []}'}, "it lists no model"),
        ({"/v1/models": '{"data": [{"id": "m"}]}'}, "does not tell max_model_len of m"),
    ],
)
def test_what_a_backend_does_not_report_is_an_error(changed: dict[str, str | None], why: str) -> None:
    assert why in refusal(engine(**changed))


def test_a_key_that_lacks_is_asked_for() -> None:
    assert refusal(engine(**{"/v1/models": None}), 401).endswith("/v1/models returned 401: give --api-key")


def test_an_unreachable_backend_and_an_invalid_url_are_errors() -> None:
    with pytest.raises(PlanError, match="connection refused"):
        ask_running("http://127.0.0.1:9")
    with pytest.raises(PlanError, match="scheme, host and port only"):
        ask_running("http://127.0.0.1:9/v1")
