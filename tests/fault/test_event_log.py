"""What `gateway serve` writes to standard error."""

import json
from pathlib import Path
from typing import Any

from tests.fault.gateway_process import gateway_process
from tests.fault.rig import holds
from tests.scripted import ScriptedBackend


async def test_settings_that_make_requests_fail_are_warned_of(backend: ScriptedBackend, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sections: dict[str, Any] = {
        "upstream": {"keep_alive_seconds": 10},
        "models": {"aliases": {"gpt-4o": "scripted", "gpt-5": "nothing"}},
    }

    def hints(event: str) -> list[str]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [line["hint"] for line in lines if line["event"] == event]

    with log.open("wb") as stderr:
        async with gateway_process(tmp_path, backend, stderr=stderr, sections=sections):
            await holds(lambda: bool(hints("alias_without_model")), "the alias is warned of")
    [alias] = hints("alias_without_model")
    assert "'gpt-5' is an alias of 'nothing'" in alias
    [keep_alive] = hints("risky_setting")
    assert "upstream.keep_alive_seconds is 10" in keep_alive
