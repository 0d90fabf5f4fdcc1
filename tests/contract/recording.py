"""Recorded answers of a real engine: one JSON file per case, metrics as text."""

import json
from pathlib import Path
from typing import Any

from tests.contract.cases import Case
from tests.contract.exchange import Answer

MODELS = Path(".models")
RECORDINGS = Path(__file__).parent / "recordings"
SHOWN_BODY_CHARACTERS = 2000


def save(case: Case, answer: Answer) -> None:
    """Write the exchange under the case's name."""
    payload = (case.payload() or b"").decode()
    shown = payload if len(payload) <= SHOWN_BODY_CHARACTERS else payload[:100] + f"... {len(payload)} characters"
    request = {"engine": case.engine, "method": case.method, "path": case.path, "headers": dict(case.headers)}
    save_json(case.name, {"request": {**request, "body": shown}, "answer": answer})


def save_json(name: str, value: Any) -> None:
    """Write any recorded value."""
    save_text(f"{name}.json", json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def save_text(file_name: str, text: str) -> None:
    """Write a text without the recording machine's own paths."""
    (RECORDINGS / file_name).write_text(text.replace(str(MODELS.absolute()), "/models"))


def load(name: str) -> Answer:
    """The recorded answer of one case."""
    recorded: dict[str, Answer] = json.loads((RECORDINGS / f"{name}.json").read_text())
    return recorded["answer"]
