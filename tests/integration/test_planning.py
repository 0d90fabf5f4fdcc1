"""`gateway plan` against engines that run."""

import json
import subprocess
import sys
from typing import Any

import pytest

from gateway.features.plan.capacity import bytes_per_sequence
from gateway.features.plan.model import read_checkpoint, read_shape
from loadtest.vllm_cpu.process import VllmOptions
from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, CONTEXT_TOKENS, MODELS, Fleet


def plan(*arguments: str) -> Any:
    """What the command prints as JSON, in a process of its own."""
    command = [sys.executable, "-m", "gateway", "plan", *arguments, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_a_running_engine_tells_what_fits(fleet: Fleet) -> None:
    document = plan(fleet.chat_urls[0], "--prompt-tokens", "1000", "--output-tokens", "24")
    assert document["model"]["max_model_len"] == CONTEXT_TOKENS
    tokens = document["backend"]["kv_cache_tokens"]
    [own] = [row for row in document["lengths"] if row["is_workload"]]
    assert (own["tokens"], own["sequences"]) == (1024, tokens // 1024)
    longest = document["lengths"][-1]
    assert longest == {
        "tokens": CONTEXT_TOKENS, "sequences": tokens // CONTEXT_TOKENS, "kv_bytes": None, "is_workload": False
    }  # fmt: skip


def test_a_real_engines_cache_holds_the_tokens_that_its_config_promises(
    fleet: Fleet, request: pytest.FixtureRequest
) -> None:
    if engine_kind(request.config) != "vllm":
        pytest.skip("needs --engine vllm")
    shape = read_shape(read_checkpoint(MODELS / CHAT_MODEL)[1])
    tokens = plan(fleet.chat_urls[0])["backend"]["kv_cache_tokens"]
    given_bytes = VllmOptions(MODELS / CHAT_MODEL).kv_cache_gib << 30
    assert tokens * bytes_per_sequence(shape, 1, 2) == pytest.approx(given_bytes, rel=0.02)
