"""checkpoint.md: the checkpoint as people read it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from loadtest.checkpoint.document import Checkpoint, Finding, Freeze, ServerInfo, Status
from loadtest.console import markdown_table

_MARKS = {Status.OK: "ok", Status.FAILED: "**FAILED**", Status.NOT_CHECKED: "not checked"}
_LONGEST_CELL = 160


def markdown(made: Checkpoint) -> str:
    parts = [
        f"# Checkpoint {made.id}: {'passed' if made.passed else 'FAILED'}",
        f"{made.started_at} to {made.ended_at}",
        _code([shlex.join(made.command)]),
        "## Verification",
        markdown_table(("check", "", "expected", "found"), map(_row, made.checks)),
        "## Results",
        markdown_table(("figure", "value"), _figures(made)),
        *(f"- {reason}" for reason in made.summary.reasons),
        "## Servers",
        *(part for server in made.servers for part in _server(server)),
        "## Machine of the client",
        markdown_table(("", ""), _machine(made)),
        "## Workload",
        markdown_table(("", ""), _workload(made)),
        "## Files",
        markdown_table(("file", "sha256"), ((f"`{name}`", f"`{digest}`") for name, digest in made.artefacts.items())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def check_line(check: Finding) -> str:
    """A check in a line of text."""
    if check.status is Status.NOT_CHECKED:
        return f"not checked  {check.name}: {check.why}"
    if check.status is Status.OK:
        return f"ok           {check.name}: {_short(check.found)}"
    why = f" ({check.why})" if check.why else ""
    return f"FAILED       {check.name}: expected {_short(check.expected)}; found {_short(check.found)}{why}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def _row(check: Finding) -> tuple[str, ...]:
    return check.name, _MARKS[check.status], check.expected, check.found or check.why


def _figures(made: Checkpoint) -> Iterator[tuple[str, str]]:
    for name, value in made.summary.model_dump().items():
        if name != "reasons" and value is not None:
            shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
            yield name.replace("_", " "), shown


def _server(server: ServerInfo) -> Iterator[str]:
    role = f"{server.role}{', driven' if server.driven else ''}"
    yield f"### {server.name or 'the target'} ({role})"
    rows = [("URL", server.url), ("version", server.version or "not told")]
    rows += [(name, why) for name in ("unreachable", "refused") if (why := getattr(server, name))]
    rows += [("model", f"{card.id}, root {card.root}, {card.max_model_len} tokens") for card in server.models]
    rows += [
        (
            f"backend {backend.get('name')}",
            f"cap {backend.get('limit_upper')}, KV tokens {backend.get('kv_cache_tokens')}",
        )
        for backend in server.backends
    ]
    rows += [("cache", ", ".join(_label_lines(labels))) for labels in server.cache_config]
    if server.process is None:
        rows.append(("command", f"not known: {server.process_unknown}"))
    yield markdown_table(("", ""), rows)
    if server.process is not None:
        variables = [f"{name}={shlex.quote(value)}" for name, value in server.process.environment.items()]
        yield _code([*variables, shlex.join(server.process.command)])
        started = f"Process {server.process.pid}, started {server.process.started_at}"
        yield f"{started}; {_packages(server.process.freeze)}." if server.process.freeze else f"{started}."
    for files in server.model_files:
        yield markdown_table(
            (f"file of {files.folder}", "sha256"), ((n, f"`{digest}`") for n, digest in files.sha256.items())
        )


def _label_lines(labels: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in labels.items() if value not in ("None", "", "False")]


def _packages(freeze: Freeze) -> str:
    named = ", ".join(f"{name} {version}" for name, version in freeze.named.items())
    return f"{freeze.packages} packages, sha256 {freeze.sha256[:16]}, among them {named}"


def _machine(made: Checkpoint) -> Iterator[tuple[str, str]]:
    runtime, hardware, source = made.runtime, made.hardware, made.source
    revision = source.git_revision or source.why
    yield "gateway, loadtest", f"{made.gateway_version}, {revision}{', with changes' if source.dirty else ''}"
    yield "packages", _packages(made.packages)
    yield "system", f"{runtime.os}, {runtime.kernel}, {runtime.python}"
    yield "container", runtime.container or "nothing tells of one"
    yield "cgroup", ", ".join(f"{name} {value}" for name, value in runtime.cgroup.items()) or "no limits are told"
    cores = f"{runtime.cpu_cores} cores, " if runtime.cpu_cores else ""
    yield "CPU", f"{runtime.cpu_model}, {cores}{runtime.cpus} CPUs, {runtime.cpus_usable} usable"
    yield "NUMA", ", ".join(f"{name} {cpus}" for name, cpus in runtime.numa_nodes.items()) or "not told"
    yield "memory", f"{runtime.memory_bytes / 2**30:.1f} GiB"
    yield "ulimits", ", ".join(f"{name} {value}" for name, value in runtime.ulimits.items())
    if hardware.no_gpu is not None:
        yield "GPU", hardware.no_gpu
        return
    yield "driver", f"{hardware.driver}, CUDA {hardware.cuda}"
    for gpu in hardware.gpus:
        clocks = ", ".join(f"{name} {value}" for name, value in gpu.clocks.items())
        yield "GPU", f"{gpu.name}, {gpu.memory}, MIG {gpu.mig}, ECC {gpu.ecc}, {gpu.power_limit}, {gpu.pcie}, {clocks}"


def _workload(made: Checkpoint) -> Iterator[tuple[str, str]]:
    workload = made.workload
    yield "plan, sha256", f"`{workload.plan_sha256}`"
    yield "seed", str(workload.seed)
    yield "requests", f"{workload.requests:,}"
    yield "bodies that were sent, sha256", f"`{workload.sent_sha256}`"
    for path, digest in workload.files.items():
        yield path, f"`{digest}`"


def _code(lines: Iterable[str]) -> str:
    return "\n".join(["```sh", *lines, "```"])
