"""Live checks: the servers respond, and answers through a gateway equal the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp

from loadtest.checkpoint.document import Finding, GreedyAnswer, Role, ServerInfo, Status
from loadtest.checkpoint.questions import Embedded, Question, Said, Unreachable, ask, embed, get, least_cosine
from loadtest.drive.plan import Plan
from loadtest.workloads.prompts import Endpoint

LEAST_COSINE = 0.999
_NO_DIRECT = "no direct URL: name the engines by --backends or as a target, or the gateway's admin port by --admin-url"


def questions_of(plan: Plan, new_salt: Callable[[], str]) -> tuple[list[Question], list[str]]:
    """The requests to generating models, and the checked embedding models. Salted if the run was.

    Cached KV values may be rounded differently from computed ones, which can change a greedy answer.
    """
    salt = new_salt if plan.cache_salt else None
    parts = [plan.part(part) for part in plan.mix] or [plan]
    generating = {
        (part.model, asked): Question(part.model, asked, part.extra_body, new_salt=salt)
        for part in parts
        if part.endpoint.generates
        and (asked := Endpoint.CHAT if part.endpoint is Endpoint.RESPONSES else part.endpoint)
    }
    return list(generating.values()), sorted({part.model for part in parts if part.endpoint is Endpoint.EMBEDDINGS})


async def verify_live(
    session: aiohttp.ClientSession,
    servers: Sequence[ServerInfo],
    questions: Sequence[Question],
    embedders: Sequence[str],
) -> tuple[list[Finding], list[GreedyAnswer]]:
    """Asks the driven server and the engines the same things. Raises nothing."""
    driven = next(server for server in servers if server.driven)
    engines = [server for server in servers if server.role is Role.ENGINE and server is not driven]
    checks = [await _health(session, server) for server in servers]
    answers: list[GreedyAnswer] = []
    if driven.unreachable:
        gone = Finding(name="answers", status=Status.FAILED, expected="an answer", found=driven.unreachable)
        return [*checks, gone], answers
    for question in questions:
        direct = {server.name: await ask(session, server.url, question) for server in _serving(engines, question.model)}
        through = await ask(session, driven.url, question)
        again = await ask(session, driven.url, question) if driven.role is Role.ENGINE else None
        stream = await ask(session, driven.url, question, stream=True)
        unsteady = await _unsteady(session, engines, question, through=through, direct=direct)
        checks += _greedy(question.model, engines, through=through, direct=direct, again=again, unsteady=unsteady)
        checks.append(_terminator(question.model, through, stream))
        answers += [
            GreedyAnswer(
                server=name,
                model=question.model,
                endpoint=question.endpoint,
                text=said.text,
                prompt_tokens=said.prompt_tokens,
                completion_tokens=said.completion_tokens,
            )
            for name, said in {driven.name: through, **direct}.items()
            if not said.error
        ]
    if not questions:
        checks.append(_skipped("greedy answer", "the run generates nothing"))
        checks.append(_skipped("end of streams", "the run generates nothing"))
    return checks + await _embeddings(session, driven, engines, questions=questions, embedders=embedders), answers


async def _health(session: aiohttp.ClientSession, server: ServerInfo) -> Finding:
    """`/health` of the server; a server without it is alive if it lists models."""
    name, expected = f"health of {server_label(server)}", "200"
    try:
        path = "/health"
        status, _ = await get(session, server.url + path)
        if status in (401, 403, 404, 405):
            path = "/v1/models"
            status, _ = await get(session, server.url + path)
    except Unreachable as why:
        if server.named:
            return Finding(name=name, status=Status.FAILED, expected=expected, found=str(why))
        return _skipped(name, f"cannot be reached from here: {why}")
    verdict = Status.OK if status == 200 else Status.FAILED
    return Finding(name=name, status=verdict, expected=expected, found=f"{status} of {path}")


def server_label(server: ServerInfo) -> str:
    """How a server is called; a single target has no name."""
    return server.name or "the target"


def _skipped(name: str, why: str) -> Finding:
    return Finding(name=name, status=Status.NOT_CHECKED, why=why)


def _serving(engines: Sequence[ServerInfo], model: str) -> list[ServerInfo]:
    return [server for server in engines if any(card.id == model for card in server.models)]


def _greedy(
    model: str,
    engines: Sequence[ServerInfo],
    through: Said,
    direct: Mapping[str, Said],
    again: Said | None,
    unsteady: Sequence[str],
) -> list[Finding]:
    """The text and the usage through the driven server equal those of the named engine, or of any."""
    text, usage = f"greedy answer of {model}", f"usage of the greedy answer of {model}"
    if through.error:
        return [Finding(name=text, status=Status.FAILED, expected="an answer", found=through.error)]
    if again is not None:
        return [_same(text, [again.text], through.text), _same(usage, [again.usage], through.usage)]
    if unsteady:
        why = f"{', '.join(unsteady)} does not repeat its own answer"
        return [_skipped(text, why), _skipped(usage, why)]
    heard = _answering(engines, through.backend, direct)
    if not heard:
        why = "; ".join(f"{name}: {said.error}" for name, said in direct.items()) or _silent(model, engines)
        return [_skipped(text, why), _skipped(usage, why)]
    return [
        _same(text, [said.text for said in heard], through.text),
        _same(usage, [said.usage for said in heard], through.usage),
    ]


async def _unsteady(
    session: aiohttp.ClientSession,
    engines: Sequence[ServerInfo],
    question: Question,
    through: Said,
    direct: Mapping[str, Said],
) -> list[str]:
    """Engines with another answer to a repeated request; tested only if the gateway's answer is not theirs."""
    if through.error or any(said.text == through.text for said in direct.values()):
        return []
    urls = {server.name: server.url for server in engines}
    return [
        name
        for name, said in direct.items()
        if not said.error and (await ask(session, urls[name], question)).text != said.text
    ]


def _silent(model: str, engines: Sequence[ServerInfo]) -> str:
    """The reason why no engine could be queried."""
    closed = "".join(
        f"; {server_label(server)}: {why}" for server in engines if (why := server.unreachable or server.refused)
    )
    return f"no engine that is known lists {model}{closed}" if engines else _NO_DIRECT


def _answering(engines: Sequence[ServerInfo], backend: str | None, direct: Mapping[str, Said]) -> list[Said]:
    """The acceptable answers through the gateway: its own engine's, if that is known."""
    named = [server.name for server in engines if backend in (server.name, urlsplit(server.url).netloc)]
    own = [said for name, said in direct.items() if name in named and not said.error]
    return own or [said for said in direct.values() if not said.error]


def _same(name: str, expected: Sequence[str], found: str) -> Finding:
    """Whether it is an expected answer; there is only one if all engines agree."""
    verdict = Status.OK if found in expected else Status.FAILED
    return Finding(name=name, status=verdict, expected=" or ".join(dict.fromkeys(expected)), found=found)


def _terminator(model: str, whole: Said, stream: Said) -> Finding:
    """A stream ends with [DONE], once and last, and has the text and usage of the whole answer."""
    name, expected = f"end of streams of {model}", f"[DONE] once, {whole.usage}, {whole.text!r}"
    found = stream.error or stream.ended or f"[DONE] once, {stream.usage}, {stream.text!r}"
    return Finding(name=name, status=Status.OK if found == expected else Status.FAILED, expected=expected, found=found)


async def _embeddings(
    session: aiohttp.ClientSession,
    driven: ServerInfo,
    engines: Sequence[ServerInfo],
    questions: Sequence[Question],
    embedders: Sequence[str],
) -> list[Finding]:
    """Of the run's embedding models, and of further ones that engines serve."""
    generating = {question.model for question in questions}
    others = {card.id for server in engines for card in server.models} - generating
    listed = {card.id for card in driven.models}
    checks = []
    for model in sorted({*embedders, *(others & listed)}):
        direct = {server.name: await embed(session, server.url, model) for server in _serving(engines, model)}
        if model not in embedders and all(each.error for each in direct.values()):
            continue  # not an embedding model
        through = await embed(session, driven.url, model)
        again = await embed(session, driven.url, model) if driven.role is Role.ENGINE else None
        checks.append(_cosine(model, through, [again] if again else list(direct.values()), engines))
    return checks or [_skipped("embeddings", "no server that is known serves embeddings")]


def _cosine(model: str, through: Embedded, direct: Sequence[Embedded], engines: Sequence[ServerInfo]) -> Finding:
    name, expected = f"embeddings of {model}", f"cosine of at least {LEAST_COSINE} with the engine's, equal usage"
    if through.error:
        return Finding(name=name, status=Status.FAILED, expected=expected, found=through.error)
    good = [each for each in direct if not each.error]
    if not good:
        return _skipped(name, "; ".join(each.error for each in direct) or _silent(model, engines))
    nearest = max(good, key=lambda each: least_cosine(through.vectors, each.vectors))
    cosine = least_cosine(through.vectors, nearest.vectors)
    fits = cosine >= LEAST_COSINE and through.prompt_tokens == nearest.prompt_tokens
    found = f"cosine {cosine:.6f}, {through.prompt_tokens} tokens, the engine {nearest.prompt_tokens}"
    return Finding(name=name, status=Status.OK if fits else Status.FAILED, expected=expected, found=found)
