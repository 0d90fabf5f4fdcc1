"""`gateway check`: queries each backend once, and reports findings, their meaning, and remedies."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from gateway.config import Config
from gateway.core.backends import vllm_api
from gateway.core.backends.concurrency_limit import DEFAULT_MAX_NUM_SEQS
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.probe import SEVERAL, Answers, survey
from gateway.core.resources import MemoryBudget
from gateway.features.discovery.follow import configured_sources
from gateway.features.discovery.listings import DiscoveryError, first_listing
from gateway.features.discovery.several_addresses import several_addresses
from gateway.features.exact import endpoints
from gateway.features.exact.endpoints import why_unreachable

SECURITY_FLOOR = (0, 22)  # older versions of vLLM have published holes that a request can reach

Report = dict[str, Any]  # one backend as the operator sees it


async def examine(config: Config) -> dict[str, list[Any]]:
    """The document of the command: a report on each backend, and warnings about all of them together."""
    tokenized = frozenset(name for name, model in config.models.by_name.items() if model.tokenizer)

    async def report(answers: Answers) -> Report:
        sources = endpoints.plan(answers.backend).sources if answers.is_reachable else ()
        reasons = [await why_unreachable(source, config.health.probe_timeout_seconds) for source in sources]
        unreachable = next((reason for reason in reasons if reason), None)
        return report_on(answers, config.routing.policy, tokenized, unreachable)

    config, problems = await with_discovered(config)
    reports = await asyncio.gather(*map(report, await survey(config)))
    names = await several_addresses(config.backends)
    problems += [problem] if (problem := await _database_problem(config)) else []
    return {"backends": reports, "warnings": [*problems, *names, *fleet_warnings(config, reports)]}


async def _database_problem(config: Config) -> str:
    """Problems with the database and the bucket that gateways share; "" = no problem, or neither is configured."""
    batches = config.batches
    if batches.path is None or batches.database is None:
        return ""
    from gateway.features.batches import postgres
    from gateway.features.batches.s3 import S3Bucket

    memory = MemoryBudget(config.server.memory_budget_bytes)
    return await postgres.check(
        batches.database, S3Bucket(batches.path, batches.s3_endpoint, batches.s3_region, memory=memory)
    )


async def with_discovered(config: Config) -> tuple[Config, list[str]]:
    """The configuration with the backends that its sources list now, and why sources cannot be read."""
    backends, problems = {backend.name: backend for backend in config.backends}, list[str]()
    for source in configured_sources(config.discovery):
        try:
            listing = await first_listing(source)
        except DiscoveryError as error:
            problems.append(f"discovery: {error}")
        else:
            problems += [f"discovery: {listing.problem}"] if listing.problem else []
            backends = {each.config.name: each.config for each in listing.backends if not each.draining} | backends
    return config.model_copy(update={"backends": tuple(backends.values())}), problems


def report_on(
    answers: Answers, policy: str, tokenized: frozenset[str] = frozenset(), events_unreachable: str | None = None
) -> Report:
    """`tokenized`: models with a tokenizer; `events_unreachable`: why the KV events cannot be read."""
    backend, facts = answers.backend, answers.backend.facts
    cap, cap_from = _cap(answers)
    tokens_are_set = backend.config.kv_cache_tokens != "auto"
    tokens_from = "kv_cache_tokens" if tokens_are_set else "unknown" if backend.kv_cache_tokens is None else "/metrics"
    knowledge, knowledge_because = _knowledge(answers, policy, tokenized, events_unreachable)
    routing, routing_because = _routing(answers, policy)
    return {
        "name": backend.name,
        "url": backend.config.url,
        "reachable": answers.is_reachable,
        "unreachable_because": None if answers.is_reachable else answers.probe_error,
        "is_engine": answers.is_engine,
        "generates": answers.generates,
        "version": facts.version,
        "models": [card.id for card in facts.models],
        "max_model_len": {card.id: card.max_model_len for card in facts.models},
        "block_size_tokens": facts.block_size_tokens,
        "kv_cache_tokens": backend.kv_cache_tokens,
        "kv_cache_tokens_from": tokens_from,
        "cap": cap,
        "cap_from": cap_from,
        "prefix_caching": facts.prefix_caching,
        "kv_events": _kv_events(answers),
        "knowledge": knowledge,
        "knowledge_because": knowledge_because,
        "routing": routing,
        "routing_because": routing_because,
        "warnings": _warnings(answers, events_unreachable),
    }


def _cap(answers: Answers) -> tuple[int | None, str]:
    backend, facts = answers.backend, answers.backend.facts
    ranks = f" x {facts.engines} ranks" if facts.engines > 1 else ""
    if backend.config.max_in_flight != "auto":
        return backend.cap, "max_in_flight"
    if not answers.is_reachable:
        return None, "unknown"
    return backend.cap, f"/server_info{ranks}" if facts.max_num_seqs else f"default {DEFAULT_MAX_NUM_SEQS}{ranks}"


def _kv_events(answers: Answers) -> str:
    backend, facts = answers.backend, answers.backend.facts
    if sources := endpoints.plan(backend).sources:
        return ", ".join(f"{source.endpoint} (listening)" if source.bind else source.endpoint for source in sources)
    if backend.config.kv_events == "off" or facts.kv_event_sources == ():
        return "off"
    return "not offered" if facts.kv_event_sources is None else "not readable"


def _knowledge(answers: Answers, policy: str, tokenized: frozenset[str], unreachable: str | None) -> tuple[str, str]:
    """The source of the knowledge of its cache, and why there is no better one."""
    facts, found = answers.backend.facts, endpoints.plan(answers.backend)
    if policy != "prefix" or facts.prefix_caching is False or not answers.is_reachable:
        return "none", "not used for routing"
    if not found.sources or unreachable:
        return "own record", found.problem or unreachable or ""
    models = {card.id for card in facts.models if card.parent is None}
    if models <= tokenized:
        return "exact blocks", "reported by its KV events"
    return "own record, corrected by KV events", "set models.<name>.tokenizer for exact blocks"


def _routing(answers: Answers, policy: str) -> tuple[str, str]:
    facts = answers.backend.facts
    if answers.probe is not ProbeResult.OK:
        return "none", answers.probe_error
    if not facts.models:
        return "none", "/v1/models lists no model"
    if policy != "prefix":
        return policy, "set by routing.policy"
    if answers.generates is False and not facts.prefix_caching:
        return "prefix", "by load only: the model generates no text"
    if facts.prefix_caching is False:
        return "prefix", "by load only: prefix caching is off"
    if facts.prefix_caching is None:
        return "prefix", "assumed: /metrics does not expose whether prefix caching is on"
    return "prefix", "prefix caching is on"


def _warnings(answers: Answers, events_unreachable: str | None) -> list[str]:
    if answers.probe is not ProbeResult.OK:
        return [f"{answers.probe_error}."]
    if not answers.is_engine:
        models = answers.problems.get(vllm_api.MODELS_PATH) or "/v1/models lists no model"
        metrics = answers.problems.get(vllm_api.METRICS_PATH) or "/metrics has none of vLLM's metrics"
        return [f"This is no vLLM server: {models}; {metrics}."]
    facts, problems, found = answers.backend.facts, answers.problems, list[str]()
    if answers.has_several:
        found.append(f"{SEVERAL[0].upper()}{SEVERAL[1:]}.")
    if (error := problems.get(vllm_api.MODELS_PATH)) and error.status == 401:
        found.append("/v1/models returned 401: set api_key to the key that vLLM was started with.")
    elif error:
        found.append(f"{error}.")
    elif not facts.models:
        found.append("/v1/models lists no model.")
    if error := problems.get("/metrics"):
        found.append(f"{error}: load and KV cache size are unknown.")
    elif not answers.is_vllm:
        found.append("/metrics has none of vLLM's metrics: load and KV cache size are unknown.")
    if facts.prefix_caching is False and answers.generates is not False:
        found.append("Prefix caching is off, so prefix routing has no effect. Start vLLM with --enable-prefix-caching.")
    release = re.match(r"v?(\d+)\.(\d+)", facts.version or "")
    if release and (int(release[1]), int(release[2])) < SECURITY_FLOOR:
        floor = ".".join(map(str, SECURITY_FLOOR))
        found.append(f"Version {facts.version} is below {floor} and has known vulnerabilities: upgrade vLLM.")
    if facts.can_admin:
        found.append(
            "Development endpoints are enabled (VLLM_SERVER_DEV_MODE): only the gateway may have access to this port."
        )
    if events_unreachable:
        found.append(f"KV events cannot be read: {events_unreachable}.")
    elif problem := endpoints.plan(answers.backend).problem if facts.kv_event_sources else None:
        found.append(f"Some KV events cannot be read: {problem}.")
    if answers.backend.config.max_in_flight == "auto" and facts.max_num_seqs is None:
        found.append("max_num_seqs is not visible: set max_in_flight to vLLM's --max-num-seqs.")
    return found


def fleet_warnings(config: Config, reports: Sequence[Report]) -> list[str]:
    found = list(config.upstream.warnings)
    with_models = [report for report in reports if report["models"]]
    if with_models:
        found += config.models.unserved([model for report in with_models for model in report["models"]])
    if len({frozenset(report["models"]) for report in with_models}) > 1:
        lists = "; ".join(f"{report['name']}: {', '.join(report['models'])}" for report in with_models)
        found.append(
            f"The backends serve different models ({lists}): each request is sent only to backends that list its model."
        )
    for model in sorted({model for report in with_models for model in report["models"]}):
        lengths = {report["max_model_len"][model] for report in with_models if model in report["max_model_len"]}
        if len(lengths) > 1:
            values = ", ".join(str(length) for length in sorted(lengths, key=lambda length: length or 0))
            found.append(f"{model} has different max_model_len values ({values}): long prompts fail on some backends.")
    if len({report["version"] for report in reports if report["version"]}) > 1:
        found.append("The backends run different versions of vLLM.")
    return found
