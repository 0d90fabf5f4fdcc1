"""Fields of requests that a target refuses are left out of a run: vLLM has them, other servers may not.

A request for a short answer is sent before the run. If its contents are refused, it is sent again with fewer fields,
until it is accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import aiohttp
from rich.console import Console

from loadtest.checkpoint.questions import open_asker
from loadtest.console import say
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.target import Target
from loadtest.workloads.prompts import NO_GROUP, Prompt

_TIMEOUT = aiohttp.ClientTimeout(total=60.0)
_REFUSED = (400, 422)
_ANSWER_TOKENS = 16  # OpenAI refuses responses of fewer
ASKED = "Which fields are accepted?"
_NO_SALT: Final = MappingProxyType[str, Any]({"cache_salt": "off"})
_NO_LENGTH: Final = MappingProxyType[str, Any]({"ignore_eos": False})
_WORDS: Final = MappingProxyType(
    {
        "cache_salt": "cache_salt: a run with the seed of another one may find its prefixes cached",
        "ignore_eos": "ignore_eos and min_tokens: answers may be shorter than --max-tokens",
    }
)


def adapted(options: RunOptions, looked: Mapping[str, Target], console: Console) -> RunOptions:
    """The options without fields that one of the targets refuses: all of them get the same requests."""
    for name, url in options.target_urls.items():
        left_out = asyncio.run(_left_out(options, url, looked[name]))
        for option in left_out:
            say(console, f"! {url} refuses {_WORDS[option]}", "yellow")
        options = options.model_copy(update=dict(left_out))
    return options


async def _left_out(options: RunOptions, url: str, target: Target) -> Mapping[str, Any]:
    """The changes of options that the target needs; none where it accepts everything, or none of the ways."""
    ways = [_NO_SALT, _NO_LENGTH, {**_NO_SALT, **_NO_LENGTH}]
    offered = {"cache_salt": options.cache_salt != "off", "ignore_eos": options.ignore_eos and not options.sends_bodies}
    ways = [way for way in ways if all(offered[name] for name in way)]
    if not ways or await _accepts(options, url, target):
        return {}
    for way in ways:
        if await _accepts(options.model_copy(update=dict(way)), url, target):
            return way
    return {}


async def _accepts(options: RunOptions, url: str, target: Target) -> bool:
    """Whether a request like the run's is accepted. The warm-up reports other errors."""
    plan = options.plan(url, target, options.loads()[0], 0)
    parts = [plan.part(part) for part in plan.mix] or [plan]
    try:
        async with open_asker(options.access) as session:
            return not any([await _is_refused(session, part) for part in parts])
    except (aiohttp.ClientError, OSError, TimeoutError):
        return True


async def _is_refused(session: aiohttp.ClientSession, plan: Plan) -> bool:
    if plan.endpoint.takes_audio or (not plan.endpoint.generates and plan.cache_salt is None):
        return False
    body = plan.body_maker().body(Prompt(NO_GROUP, prefix="", tail=ASKED, max_tokens=_ANSWER_TOKENS))
    url, headers = plan.url + plan.endpoint.path, {"content-type": "application/json"}
    async with session.post(url, data=body, headers=headers, timeout=_TIMEOUT, allow_redirects=False) as response:
        await response.read()
        return response.status in _REFUSED
