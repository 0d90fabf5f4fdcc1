"""The schema of checkpoint.json."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from loadtest.report.schema import Bounds, StrictModel

CHECKPOINT_SCHEMA_VERSION = 1


class Status(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


class Finding(StrictModel):
    """One check: the expected value, the actual one, and the reason if it could not be made."""

    name: str
    status: Status
    expected: str = ""
    found: str = ""
    why: str = ""


class Runtime(StrictModel):
    """The machine that the client ran on. None: not reported."""

    os: str
    kernel: str
    container: str | None = Field(description="The sign that this is a container; None: there is none.")
    cgroup: dict[str, str] = Field(description="Limits, as the kernel's files have them.")
    python: str
    cpu_model: str
    cpus: int
    cpus_usable: int = Field(description="Of them, those that this process may run on.")
    cpu_cores: int | None
    cpu_flags: str
    numa_nodes: dict[str, str] = Field(description="CPUs of each node.")
    memory_bytes: int
    ulimits: dict[str, str] = Field(description="soft/hard")


class Gpu(StrictModel):
    """One GPU, by NVML. N/A: not reported."""

    name: str
    uuid: str
    memory: str
    mig: str
    ecc: str
    persistence: str
    power_limit: str
    clocks: dict[str, str] = Field(description="Now, and the highest.")
    pcie: str


class Hardware(StrictModel):
    """The machine's GPUs, by NVML."""

    no_gpu: str | None = Field(description="Why none is reported.")
    driver: str = ""
    cuda: str = ""
    gpus: list[Gpu] = Field(default_factory=list)
    topology: str = Field(default="", description="How each two GPUs are connected, a line for each pair.")


class SourceTree(StrictModel):
    """The tree that this program runs from, and with it a gateway that was started from the same tree."""

    git_revision: str | None
    dirty: bool | None = Field(description="Whether files differ from the revision.")
    why: str = Field(default="", description="Why the revision is not known.")


class Freeze(StrictModel):
    """All packages of one Python environment."""

    packages: int
    sha256: str = Field(description="Of sorted lines name==version.")
    named: dict[str, str] = Field(description="Versions of those that matter most.")


class ProcessInfo(StrictModel):
    """A process of this machine. Secrets are starred out; of the environment, the variables for serving are kept."""

    pid: int
    command: list[str]
    environment: dict[str, str]
    directory: str = ""
    started_at: str = ""
    freeze: Freeze | None = None


class ModelCard(StrictModel):
    """What a server lists."""

    id: str
    root: str = ""
    max_model_len: int | None = None


class ModelFiles(StrictModel):
    """A model's local folder."""

    folder: str
    sha256: dict[str, str] = Field(description="Of its configuration and tokenizer.")
    weights_bytes: dict[str, int] = Field(description="Sizes; weights are not hashed.")


class Role(StrEnum):
    """What a server is."""

    ENGINE = "engine"
    GATEWAY = "gateway"


class ServerInfo(StrictModel):
    """A server's own reports, and its process if it runs on this machine."""

    name: str
    url: str
    role: Role
    driven: bool = Field(description="Whether this run's load went to it.")
    named: bool = Field(description="By the user; others were found by asking the gateway.")
    unreachable: str = Field(default="", description="Why nothing answers there.")
    refused: str = Field(default="", description="What it answers instead of a list of models.")
    version: str = ""
    models: list[ModelCard] = Field(default_factory=list)
    cache_config: list[dict[str, str]] = Field(default_factory=list, description="Labels of vllm:cache_config_info.")
    server_info: Any = Field(default=None, description="/server_info, where the server offers it.")
    process: ProcessInfo | None = None
    process_unknown: str = Field(default="", description="Why its command is not known.")
    model_files: list[ModelFiles] = Field(default_factory=list)
    admin_url: str = ""
    backends: list[dict[str, Any]] = Field(default_factory=list, description="/admin/backends of a gateway.")
    configuration: Any = Field(default=None, description="A local gateway's effective configuration.")


class GreedyAnswer(StrictModel):
    """A greedy answer that a later look must find again."""

    server: str
    model: str
    endpoint: str
    text: str
    prompt_tokens: int | None
    completion_tokens: int | None


class SentWorkload(StrictModel):
    """What was sent."""

    plan_sha256: str
    seed: int
    files: dict[str, str] = Field(description="sha256 of datasets and traces.")
    requests: int
    sent_sha256: str = Field(description="Over the hashes of the bodies that were sent, in order.")


class Summary(StrictModel):
    """The figures of results.json that people quote, and its verdict."""

    offered: int
    succeeded: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    e2e_p99_ms: float | None
    valid: bool
    passed: bool
    reasons: list[str]


class Checkpoint(StrictModel):
    """Everything that is needed to believe a run, or to doubt it."""

    schema_version: int = CHECKPOINT_SCHEMA_VERSION
    id: str
    started_at: str
    ended_at: str
    command: list[str]
    runtime: Runtime
    hardware: Hardware
    source: SourceTree
    packages: Freeze
    gateway_version: str
    servers: list[ServerInfo]
    workload: SentWorkload
    bounds: Bounds = Field(description="What the run had to keep to.")
    summary: Summary
    checks: list[Finding]
    answers: list[GreedyAnswer]
    passed: bool = Field(description="The results' verdict, and no check failed.")
    artefacts: dict[str, str] = Field(description="sha256 of the files beside this one.")


def failed(checks: list[Finding]) -> list[Finding]:
    return [check for check in checks if check.status is Status.FAILED]
