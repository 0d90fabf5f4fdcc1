"""What has changed on servers since a checkpoint, and whether they still do what they should."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loadtest.checkpoint.asking import open_asker
from loadtest.checkpoint.document import Answer, Check, Checkpoint, Server, Status
from loadtest.checkpoint.recheck import differences
from loadtest.checkpoint.serving import look
from loadtest.checkpoint.verification import questions_of, told, verify_live
from loadtest.drive.plan import Plan

# Facts that make a server the same one; when it was started, and as which process, do not.
_FACTS = (
    "refused",
    "role",
    "version",
    "models",
    "cache_config",
    "server_info",
    "model_files",
    "backends",
    "configuration",
)
_PROCESS_FACTS = ("command", "environment", "directory", "freeze")


async def live(made: Checkpoint, plan: Plan, urls: Mapping[str, str], api_key: str | None) -> list[Check]:
    """Looks at the recorded servers again, at other URLs where `urls` names some, and verifies anew.

    A server that is gone is not checked, unless its URL was given.
    """
    async with open_asker(api_key) as session:
        servers, checks = [], list[Check]()
        for server in made.servers:
            url = urls.get(server.name, server.url)
            admin_url = server.admin_url if url == server.url else ""
            now = await look(session, server.name, url, driven=server.driven, named=True, admin_url=admin_url)
            if now.unreachable:
                checks.append(_gone(now, given=server.name in urls))
            else:
                servers.append(now)
                checks += drift(server, now)
        if not any(server.driven for server in servers):
            return checks
        again, answers = await verify_live(session, servers, *questions_of(plan, lambda: secrets.token_hex(8)))
    return [*checks, *again, *_as_recorded(made.answers, answers)]


def drift(recorded: Server, now: Server) -> Iterator[Check]:
    """A check for each fact of the server that is not as it was recorded, and one for all that are."""
    before, after = recorded.model_dump(mode="json"), now.model_dump(mode="json")
    facts = {fact: (before[fact], after[fact]) for fact in _FACTS if before[fact] or after[fact]}
    if recorded.process is not None and now.process is not None:
        facts |= {fact: (before["process"][fact], after["process"][fact]) for fact in _PROCESS_FACTS}
    changed = [fact for fact, (was, is_now) in facts.items() if was != is_now]
    if not changed:
        all_facts = ", ".join(facts)
        yield Check(name=f"{told(recorded)} is as recorded", status=Status.OK, expected=all_facts, found=all_facts)
    for fact in changed:
        yield _changed(f"{fact} of {told(recorded)}", *facts[fact])
    if recorded.process is not None and now.process is None:
        yield Check(name=f"command of {told(recorded)}", status=Status.NOT_CHECKED, why=now.process_unknown)


def _changed(name: str, recorded: Any, now: Any) -> Check:
    wrong = list(differences(recorded, now))
    expected = "; ".join(f"{path} {was}".strip() for path, was, _ in wrong)
    found = "; ".join(f"{path} {is_now}".strip() for path, _, is_now in wrong)
    return Check(name=name, status=Status.FAILED, expected=expected, found=found)


def _gone(server: Server, *, given: bool) -> Check:
    name = f"{told(server)} at {server.url}"
    if given:
        return Check(name=name, status=Status.FAILED, expected="an answer", found=server.unreachable)
    return Check(name=name, status=Status.NOT_CHECKED, why=f"it is not up: {server.unreachable}")


def _as_recorded(recorded: Sequence[Answer], now: Sequence[Answer]) -> Iterator[Check]:
    """The same question has the same greedy answer as then."""
    known = {(answer.server, answer.model, answer.endpoint): answer for answer in recorded}
    for answer in now:
        before = known.get((answer.server, answer.model, answer.endpoint))
        if before is not None:
            same = before == answer
            yield Check(
                name=f"greedy answer of {answer.model} by {answer.server or 'the target'}, as recorded",
                status=Status.OK if same else Status.FAILED,
                expected=f"{before.text!r}, {before.prompt_tokens} + {before.completion_tokens} tokens",
                found=f"{answer.text!r}, {answer.prompt_tokens} + {answer.completion_tokens} tokens",
            )
