"""The settings of a simulated engine, given at its start."""

from dataclasses import KW_ONLY, dataclass, field

from loadtest.engine.kv_events import KvEventsConfig
from loadtest.engine.scheduler import Limits
from loadtest.engine.step_time import PRESETS, StepTime


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One simulated vLLM server. `time_scale` multiplies all engine times: 0 answers immediately, 1 is real time."""

    model: str = "sim"
    _: KW_ONLY
    host: str = "127.0.0.1"
    port: int = 0
    limits: Limits = field(default_factory=Limits)
    step_time: StepTime = PRESETS["h100-8b"]
    time_scale: float = 1.0
    max_model_len: int = 131_072
    lora_adapters: tuple[str, ...] = ()
    api_key: str | None = None
    embedding: bool = False
    embedding_dimensions: int = 384
    # CPU that the API server spends on each pooling request, and on each of its inputs, beside what this process does.
    api_request_seconds: float = 0.0
    api_input_seconds: float = 0.0
    # Offer /sim/*, obey x-sim-script, keep a ledger; implies dev_mode.
    control: bool = False
    # Offer the routes of VLLM_SERVER_DEV_MODE and others that clients must not reach.
    dev_mode: bool = False
    max_num_queued_reqs: int | None = None
    prompt_tokens_details: bool = True
    responses_store: bool = False
    # Answer with the x-request-id of the request, or a new one.
    request_id_headers: bool = False
    keep_alive_seconds: float = 5.0
    shutdown_timeout_seconds: float = 0.0
    max_body_bytes: int = 32 * 1024 * 1024
    version: str = "0.33.0"
    # Engines behind this server, each with its own limits and KV cache.
    data_parallel_size: int = 1
    kv_events: KvEventsConfig | None = None

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ValueError(f"data_parallel_size must be at least 1, not {self.data_parallel_size}")
        batched, longest = self.limits.max_num_batched_tokens, self.max_model_len
        if not self.limits.chunked_prefill and batched < longest:
            raise ValueError(
                f"max_num_batched_tokens ({batched}) is smaller than max_model_len ({longest}): without chunked "
                "prefill a prompt is computed in one step. Increase max_num_batched_tokens or decrease max_model_len."
            )
