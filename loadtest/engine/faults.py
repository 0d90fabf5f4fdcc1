"""Scripted misbehaviour: of one request (header `x-sim-script`) or of the server (POST /sim/faults)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0)]


class Script(BaseModel):
    """What happens to one request. Token numbers count the tokens sent before the fault, over all choices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    headers_delay_seconds: _Seconds = 0.0
    # Answer with this status instead: no generation happens.
    status: Annotated[int, Field(ge=400, le=599)] | None = None
    retry_after: str | None = None
    message: str = "scripted failure"
    # Read the request and never answer.
    hang: bool = False
    # Close the connection before the response's headers.
    die_before_headers: Literal["fin", "rst"] | None = None
    die_at_token: _Count | None = None
    # Close after the chunk with the finish_reason, before usage and [DONE].
    die_after_finish: bool = False
    die_by: Literal["fin", "rst"] = "fin"
    stall_at_token: _Count | None = None
    garbage_at_token: _Count | None = None
    error_at_token: _Count | None = None
    no_done: bool = False
    tokens_per_second: Annotated[float, Field(gt=0)] | None = None
    output_tokens: Annotated[int, Field(ge=1)] | None = None
    model: str | None = None


class ServerFaults(BaseModel):
    """What is wrong with the server until that is changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # For the next `script_requests` inference requests, or all.
    script: Script | None = None
    script_requests: _Count | None = None
    engine_dead: bool = False
    engine_paused: bool = False
    health_status: Annotated[int, Field(ge=200, le=599)] | None = None
    health_delay_seconds: _Seconds = 0.0
    metrics_delay_seconds: _Seconds = 0.0
    metrics_garbage: bool = False
    metrics_bytes: _Count = 0
    metrics_status: Annotated[int, Field(ge=200, le=599)] | None = None
    models_status: Annotated[int, Field(ge=200, le=599)] | None = None
    # Of each rank, that many batches of KV events are numbered and kept for replay, but not sent.
    kv_events_drop_batches: _Count = 0
    # KV events are neither sent nor replayed; they gather, and are sent when this ends.
    kv_events_hang: bool = False
    # The name of the served model, as after a restart with another one.
    model: str | None = None


@dataclass(slots=True)
class Faults:
    """The faults in force."""

    current: ServerFaults
    _scripted_requests_left: int | None = None

    @classmethod
    def none(cls) -> "Faults":
        return cls(ServerFaults())

    def replace(self, faults: ServerFaults) -> None:
        """From now on, these and no others."""
        self.current = faults
        self._scripted_requests_left = faults.script_requests

    @property
    def engine_dead(self) -> bool:
        return self.current.engine_dead

    @property
    def model(self) -> str | None:
        """The other model that is served."""
        return self.current.model

    def script_for(self, header: str | None) -> Script | None:
        """The script of the next request: its own, else the server's. ValidationError if it is malformed."""
        if header is not None:
            return Script.model_validate_json(header)
        script = self.current.script
        if script is not None and self._scripted_requests_left is not None:
            if not self._scripted_requests_left:
                return None
            self._scripted_requests_left -= 1
        return script
