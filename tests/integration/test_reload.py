"""`POST /admin/reload` while a gateway serves: what its caches hold stays, and a wrong file changes nothing."""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from openai import AsyncOpenAI

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.prompts import chat, long_prefix


def rewritten(folder: Path, text: str = "", **sections: dict[str, Any]) -> Path:
    """Change sections of the gateway's file, or add this text to it."""
    [file] = folder.glob("gateway-*.yaml")
    document = yaml.safe_load(file.read_text())
    merged = {name: {**document.get(name, {}), **section} for name, section in sections.items()}
    file.write_text(yaml.safe_dump({**document, **merged}) + text)
    return file


def reload(gateway: Gateway) -> dict[str, Any]:
    """What the admin port answers."""
    asked = urllib.request.Request(f"{gateway.admin_url}/admin/reload", method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return dict(orjson.loads(answer.read()))
    except urllib.error.HTTPError as error:
        return dict(orjson.loads(error.read()))


async def predicted_tokens(client: AsyncOpenAI, content: str) -> int:
    raw = await client.chat.completions.with_raw_response.create(**chat(content, tokens=2))
    return int(raw.headers["x-gateway-prefix-tokens"])


@pytest.fixture
def sections() -> dict[str, Any]:
    return {"routing": {"aging": 0.05}}


async def test_hits_are_predicted_after_a_reload_of_routing_and_admission(
    start_gateway: StartGateway, fleet: Fleet, tmp_path: Path, sections: dict[str, Any]
) -> None:
    with start_gateway(sections) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as client:
            prefix = long_prefix()
            assert await predicted_tokens(client, f"{prefix} One.") == 0
            rewritten(tmp_path, routing={"aging": 0.2, "decode_weight": 2.0}, admission={"kv_headroom": 0.9})
            changed = reload(gateway)
            assert [each["path"] for each in changed["changed"]] == [
                "routing.decode_weight",
                "routing.aging",
                "admission.kv_headroom",
            ]
            assert changed["needs_restart"] == []
            assert await predicted_tokens(client, f"{prefix} Two.") > 0


async def test_a_mistake_is_named_with_file_line_and_key(
    start_gateway: StartGateway, fleet: Fleet, tmp_path: Path, sections: dict[str, Any]
) -> None:
    with start_gateway(sections) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        file = rewritten(tmp_path, "embeddings:\n  max_batch_items: -1\n")
        line = len(file.read_text().splitlines())
        message = reload(gateway)["error"]["message"]
        assert f"Nothing was changed. {file}:{line}: embeddings.max_batch_items: " in message
        rewritten(tmp_path, routing={"policy": "round_robin"}, embeddings={"max_batch_items": 1})
        assert {each["path"] for each in reload(gateway)["changed"]} == {"routing.policy", "embeddings.max_batch_items"}
